"""Layers of a recurrence: its convolution, its heads' parameters, the recurrence itself, and the gates around it.

    T tokens, C channels, K taps, H heads, R slots of the pools of states, P rows of a ring (`ring_rows`).

A layer's states are in pools like its keys and values would: what a step leaves there the next one finds, and a
sequence that begins with the step begins with zeros, whatever its slot holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.recurrent_variant import DeltaInputs, GatedDelta, Mamba2, Mamba2Inputs
from evalengine.layers.base import Layer, MergedRows, load_part
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops


class States(NamedTuple):
    """The pools of one layer."""

    # [R, P, C] in the activations' dtype: the convolution's last inputs, that of position p in row p % P
    conv: Tensor
    recurrent: tuple[Tensor, ...]  # the recurrence's `state_pools`
    # How many layers' chunks are closed before this layer's rule. The first layer of a kind closes those of all, whose
    # pools follow its own in memory, in one launch.
    closes: int = 1


class HybridCache(NamedTuple):
    """The cache of a layer with attention and a recurrence in parallel."""

    kv: KVCache
    states: States


LayerCache = KVCache | States | HybridCache


def layer_cache(kv: LayerCache, states: States, beside_attention: bool) -> LayerCache:
    """The cache of a layer with a recurrence; kv: that of a layer with attention."""
    return HybridCache(kv, states) if beside_attention else states  # type: ignore[arg-type]


class CausalConv(MergedRows):
    """[T, c] -> [T, c], of this rank's channels: a depthwise causal convolution, and its SiLU. `sizes` names its
    checkpoint tensors."""

    def __init__(
        self,
        ops: Ops,
        sizes: dict[str, int],
        taps: int,
        *,
        bias: bool,
        silu: bool,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(ops, sizes, parts)
        self.taps, self.silu = taps, silu
        self.weight = self.new_parameter(self.rows, taps)
        self.bias = self.new_parameter(self.rows) if bias else None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {shard: (rows, 1, self.taps) for shard, rows in self.sizes.items()}

    def finalize(self) -> None:
        """Puts the weights of a tap next to each other: a kernel loads them for many channels at once."""
        self.weight.data = self.weight.data.t().contiguous().t()

    def forward(self, x: Tensor, ring: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.ops.causal_conv(x, self.weight, self.bias, ring, metadata, silu=self.silu)


class HeadVector(Layer):
    """A number for each of this rank's heads, float32, which the recurrence takes."""

    def __init__(self, ops: Ops, heads: int) -> None:
        super().__init__(ops)
        self.heads = heads
        values = torch.empty(heads // ops.tp.size, dtype=torch.float32, device=ops.device)
        self.weight = nn.Parameter(values, requires_grad=False)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.heads,)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        load_part(param, loaded_weight, self.ops.tp, by_rows=True)


class GatedDeltaRule(Layer):
    """q, k and v side by side [T, C], a and b [T, Hv] -> [T, Hv, V]."""

    def __init__(self, ops: Ops, variant: GatedDelta) -> None:
        super().__init__(ops)
        self.variant = variant.of_rank(ops.tp.size)

    def forward(
        self,
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        heads: tuple[Tensor, ...],
        states: States,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """heads: A_log and dt_bias."""
        inputs = DeltaInputs(mixed, a, b, *heads)
        return self.ops.gated_delta(inputs, states.recurrent, states.closes, metadata, self.variant)


class Mamba2Scan(Layer):
    """x, B and C side by side [T, C], the time step [T, H] -> [T, H, P]."""

    def __init__(self, ops: Ops, variant: Mamba2) -> None:
        super().__init__(ops)
        self.variant = variant.of_rank(ops.tp.size)

    def forward(
        self,
        mixed: Tensor,
        dt: Tensor,
        heads: tuple[Tensor, ...],
        states: States,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """heads: A_log, dt_bias and D."""
        inputs = Mamba2Inputs(mixed, dt, *heads)
        return self.ops.mamba2(inputs, states.recurrent, states.closes, metadata, self.variant)


class GatedNorm(Layer):
    """[T, w] twice, of this rank's columns -> the same: RMS norms of groups, gated by SiLU before (`gate_first`) or
    after.

    A rank norms the groups that it has whole. Of groups that reach over ranks all columns are gathered first, and where
    no sum may cross ranks, which is where all of them are needed next, the result is [T, W].
    """

    def __init__(
        self,
        ops: Ops,
        width: int,
        group: int,
        eps: float,
        *,
        gate_first: bool,
        repeated: bool = False,
        rounded_once: bool = False,
    ) -> None:
        """width: W, of all ranks. repeated: every group has the same weights."""
        super().__init__(ops)
        self.group, self.eps, self.gate_first, self.rounded_once = group, eps, gate_first, rounded_once
        self.size, ranks = group if repeated else width, ops.tp.size
        self.gathers = width // ranks % group != 0
        self.whole = repeated or self.gathers
        self.weight = self.new_parameter(self.size if self.whole else self.size // ranks)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.size,)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        if self.whole:
            param.copy_(loaded_weight)
        else:
            load_part(param, loaded_weight, self.ops.tp, by_rows=True)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        tp = self.ops.tp
        if self.gathers:
            x, gate = tp.keep(tp.gather_features(x)), tp.gather_features(gate.contiguous())
        out = self.ops.gated_norm(
            x, gate, self.weight, self.eps, self.group, gate_first=self.gate_first, rounded_once=self.rounded_once
        )
        return out.chunk(tp.size, 1)[tp.rank] if self.gathers and self.ops.sums_cross_ranks else out


class SigmoidGate(Layer):
    """[T, W] twice: x * sigmoid(gate)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.ops.gate(x, gate)


class Multiply(Layer):
    """Any shape twice: x * y, rounded once."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ops.multiply(x, y)
