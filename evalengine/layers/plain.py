"""Plain PyTorch ops over the weights of another level: the self-test compares that level's logprobs with theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evalengine.kernels.mixture_variant import Router
from evalengine.kernels.packed_rows import PackedFragments, unpacked_by_torch
from evalengine.layers import fast_mixture
from evalengine.layers.fast import FastOps
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Groups, Ops, PreparedWeight
from evalengine.layers.variants import Norm

HEAD_ROWS = 1 << 15  # rows of lm_head that are converted to float32 at once


class PlainOps(FastOps):
    """torch's own ops in `dtype`, over weights as `native` holds them: in the run's dtype, or packed.

    A weight is converted where it is used, so no second copy of the model is made. With `choices`, a token has the
    experts that another computation chose: a choice between two that are nearly equal would otherwise count as an
    error.
    """

    name = "plain"
    sums_cross_ranks = False  # the ranks' weights are those of a level in which no sum crosses ranks
    num_choices = num_other_choices = 0  # tokens' choices of experts, and those that these ops would make otherwise

    def __init__(self, ops: Ops, dtype: torch.dtype, choices: Sequence[Tensor] | None = None) -> None:
        """ops: the run's. dtype: that of activations and of the KV cache. choices: the experts [T, k] of each layer
        that has some."""
        super().__init__(dtype, ops.device)
        self.run_dtype, self.tp, self.vocabulary_block = ops.dtype, ops.tp, ops.vocabulary_block
        self._choices = None if choices is None else iter(choices)

    def route(self, logits: Tensor, choice_bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
        own, weights = super().route(logits, choice_bias, router)
        if self._choices is None:
            return own, weights
        ids = next(self._choices).long()
        self.num_choices += len(ids)
        self.num_other_choices += int((ids.sort(-1).values != own.sort(-1).values).any(-1).sum())
        return fast_mixture.route(logits, choice_bias, router, self.dtype, ids)

    def _numbers(self, weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
        """The weight's numbers, rounded to the run's dtype as they are when a checkpoint is unpacked."""
        if isinstance(weight, PackedFragments):
            weight = unpacked_by_torch(weight).to(self.run_dtype)
        return weight.to(dtype)

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, self._numbers(weight, x.dtype), _as(bias, x))

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        parts = weight.split(HEAD_ROWS)
        return torch.cat([F.linear(x.float(), self._numbers(part, torch.float32)) for part in parts], -1)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table).to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight.to(x.dtype), eps)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        return super().norm(x, weight.to(x.dtype), _as(bias, x), norm)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rope(x, cos.to(x.dtype), sin.to(x.dtype))

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, metadata: AttentionMetadata, *, silu: bool
    ) -> Tensor:
        return super().causal_conv(x, weight, _as(bias, x), ring, metadata, silu=silu)

    def expert_linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None, groups: Groups) -> Tensor:
        out = torch.empty(*groups.shape, weight.shape[1], dtype=x.dtype, device=x.device)
        for expert in groups.unique().tolist():
            token, rank = (groups == expert).nonzero(as_tuple=True)
            own = weight.of(expert) if isinstance(weight, PackedFragments) else weight[expert]
            rows = x[token] if x.ndim == 2 else x[token, rank]
            out[token, rank] = self.linear(rows, own, None if bias is None else bias[expert])
        return out


@contextmanager
def computed_by(model: nn.Module, ops: Ops) -> Iterator[list[Tensor]]:
    """Run the model's layers with `ops`. Yields the experts that `ops` chooses, layer by layer."""
    users = [module for module in model.modules() if isinstance(getattr(module, "ops", None), Ops)]
    before, chosen, route = [module.ops for module in users], [], ops.route

    def noted(*arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(*arguments)
        chosen.append(ids)
        return ids, weights

    try:
        ops.route = noted  # type: ignore[assignment]
        for module in users:
            module.ops = ops  # type: ignore[assignment]
        yield chosen
    finally:
        del ops.route
        for module, own in zip(users, before, strict=True):
            module.ops = own


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)
