"""The layers of a mixture of experts: the choice, the experts' products, their weighted sum, the shared expert's gate.

    T tokens, E experts, of which each token has k; H hidden, I an expert's intermediate size, h and i a rank's parts.

As in `linear`, a rank holds some of the output rows of every expert, or of the input columns where `fast` sums over
ranks; every rank makes the whole choice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evalengine.kernels.mixture_variant import Router
from evalengine.layers.base import Layer, ProductLayer, load_part, shard_rows
from evalengine.layers.ops import Groups, Ops, PreparedWeight


class RouterLogits(ProductLayer):
    """[T, H] -> the experts' logits [T, E], in float32 if the router is wide, whose weight is float32 then."""

    def __init__(self, ops: Ops, router: Router, hidden_size: int) -> None:
        super().__init__(ops)
        self.router, self.shape = router, (router.experts, hidden_size)
        self.weight: nn.Parameter | None = self._parameter(*self.shape)
        self.bias = self._parameter(router.experts) if router.bias else None

    def _parameter(self, *shape: int) -> nn.Parameter:
        parameter = self.new_parameter(*shape)
        return nn.Parameter(parameter.float(), requires_grad=False) if self.router.wide else parameter

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: self.shape}

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x.float() if self.router.wide else x, self.prepared, self.bias)


class ExpertChoice(Layer):
    """Logits [T, E] -> each token's experts in order of rank, integers [T, k], and their weights, float32 [T, k]."""

    def __init__(self, ops: Ops, router: Router) -> None:
        super().__init__(ops)
        self.router = router
        bias = torch.empty(router.experts, dtype=torch.float32, device=ops.device) if router.choice_bias else None
        self.e_score_correction_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {"gate": (self.router.experts,)}  # where checkpoints store it, with the logits' weight

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.route(logits, self.e_score_correction_bias, self.router)


class _Experts(ProductLayer):
    """One product with a weight of each expert, [E, n, k]."""

    bias: nn.Parameter | None

    def _allocate(self, experts: int, rows: int, columns: int, bias: bool) -> None:
        self.weight = self.new_parameter(experts, rows, columns)
        self.bias = self.new_parameter(experts, rows) if bias else None

    def prepare(self, weight: Tensor) -> PreparedWeight:
        return self.ops.prepare_experts(weight)


class ExpertGateUp(_Experts):
    """[T, H] -> [T, k, 2 i]: gate and up of each token's experts."""

    def __init__(self, ops: Ops, experts: int, hidden_size: int, inner: int, bias: bool) -> None:
        super().__init__(ops)
        self.experts, self.shape = experts, (inner, hidden_size)
        self.rows = inner // ops.tp.size
        self._allocate(experts, 2 * self.rows, hidden_size, bias)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {f"{expert}.{part}": self.shape for expert in range(self.experts) for part in ("gate_proj", "up_proj")}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        expert, _, part = shard.partition(".")
        own = shard_rows(loaded_weight, self.ops.tp.rank, self.ops.tp.size)
        param[int(expert)].narrow(0, self.rows * (part == "up_proj"), self.rows).copy_(own)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        return self.ops.expert_linear(self.quantized(x), self.prepared, self.bias, groups)


class ExpertDown(_Experts):
    """[T, k, i] -> [T, k, h], this rank's output columns, for which the inputs are gathered; or, where sums may cross
    ranks, [T, k, H] of this rank's inputs, a part of the sum."""

    def __init__(self, ops: Ops, experts: int, inner: int, hidden_size: int, bias: bool) -> None:
        super().__init__(ops)
        self.experts, self.shape = experts, (hidden_size, inner)
        self.by_rows = not ops.sums_cross_ranks or ops.tp.size == 1
        size = ops.tp.size
        own = (hidden_size // size, inner) if self.by_rows else (hidden_size, inner // size)
        self._allocate(experts, *own, bias)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {f"{expert}.{name}": self.shape for expert in range(self.experts)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        load_part(param[int(shard.partition(".")[0])], loaded_weight, self.ops.tp, self.by_rows)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        if not self.by_rows:
            return self.ops.expert_linear(self.quantized_part(x), self.prepared, self.bias, groups)
        if x.shape[-1] < self.shape[1]:
            x = self.ops.tp.gather_features(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.ops.expert_linear(self.quantized(x), self.prepared, self.bias, groups)


class Combine(Layer):
    """The experts' outputs [T, k, h], their weights [T, k], and the shared expert's output, if any -> the residual
    stream's next addend, [T, H], or [T, h] if the gathers are fused."""

    def __init__(self, ops: Ops, *, whole: bool) -> None:
        """whole: every rank gets all columns, also where the gathers are fused."""
        super().__init__(ops)
        self.whole = whole

    def forward(self, x: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        part = self.ops.combine(x, weights)
        if shared is not None:
            part = self.ops.add(part, shared)
        tp = self.ops.tp
        if self.ops.sums_cross_ranks:
            return tp.sum(part)
        return part if self.ops.fuses_gathers and not self.whole else tp.gather_features(part)


class SharedGate(ProductLayer):
    """x [T, H] and the shared expert's output [T, h] -> that output times sigmoid(x . weight)."""

    def __init__(self, ops: Ops, hidden_size: int) -> None:
        super().__init__(ops)
        self.shape = (1, hidden_size)
        self.weight: nn.Parameter | None = self.new_parameter(*self.shape)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: self.shape}

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return self.ops.gate(shared, self.ops.linear(x, self.prepared))
