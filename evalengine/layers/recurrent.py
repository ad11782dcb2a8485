"""Layers of a recurrence: its convolution, its heads' parameters, the recurrence itself, and the gates around it.

    T tokens, C channels, K taps, H heads, R slots of the pools of states.

A layer's states lie in pools like its keys and values would: what a step leaves there the next one finds, and a
sequence that begins with the step begins with zeros, whatever its slot holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from evalengine.kernels.recurrent_variant import DeltaInputs, GatedDelta, Mamba2, Mamba2Inputs
from evalengine.layers.base import Layer
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops


class States(NamedTuple):
    """The pools of one layer."""

    conv: Tensor  # [R, C, K - 1] in the activations' dtype: each sequence's last inputs of the convolution
    recurrent: Tensor  # float32 [R, *state_shape]; empty for a convolution alone


class CausalConv(Layer):
    """[T, C] -> [T, C]: a depthwise causal convolution, and its SiLU. `sizes` names its checkpoint tensors."""

    def __init__(self, ops: Ops, sizes: dict[str, int], taps: int, *, bias: bool, silu: bool) -> None:
        super().__init__(ops)
        self.sizes, self.taps, self.silu = sizes, taps, silu
        channels = sum(sizes.values())
        self.weight = self.new_parameter(channels, taps)
        self.bias = self.new_parameter(channels) if bias else None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {shard: (rows, 1, self.taps) for shard, rows in self.sizes.items()}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        names = list(self.sizes)
        first = sum(self.sizes[name] for name in names[: names.index(shard)])
        own = param.narrow(0, first, self.sizes[shard])
        own.copy_(loaded_weight.view_as(own))

    def forward(self, x: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.ops.causal_conv(x, self.weight, self.bias, state, metadata, silu=self.silu)


class HeadVector(Layer):
    """A number for each head, float32 [H], which the recurrence takes."""

    def __init__(self, ops: Ops, heads: int) -> None:
        super().__init__(ops)
        self.heads = heads
        values = torch.empty(heads, dtype=torch.float32, device=ops.device)
        self.weight = nn.Parameter(values, requires_grad=False)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.heads,)}


class GatedDeltaRule(Layer):
    """q, k and v side by side [T, C], a and b [T, Hv] -> [T, Hv, V]."""

    def __init__(self, ops: Ops, variant: GatedDelta) -> None:
        super().__init__(ops)
        self.variant = variant

    def forward(
        self, mixed: Tensor, a: Tensor, b: Tensor, heads: tuple[Tensor, ...], state: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """heads: A_log and dt_bias."""
        return self.ops.gated_delta(DeltaInputs(mixed, a, b, *heads), state, metadata, self.variant)


class Mamba2Scan(Layer):
    """x, B and C side by side [T, C], the time step [T, H] -> [T, H, P]."""

    def __init__(self, ops: Ops, variant: Mamba2) -> None:
        super().__init__(ops)
        self.variant = variant

    def forward(
        self, mixed: Tensor, dt: Tensor, heads: tuple[Tensor, ...], state: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """heads: A_log, dt_bias and D."""
        return self.ops.mamba2(Mamba2Inputs(mixed, dt, *heads), state, metadata, self.variant)


class GatedNorm(Layer):
    """[T, W] twice -> [T, W]: RMS norms of groups, gated by SiLU before (`gate_first`) or after."""

    def __init__(self, ops: Ops, size: int, group: int, eps: float, *, gate_first: bool) -> None:
        """size: of the weight; all of W, or a group of which every one has the same."""
        super().__init__(ops)
        self.size, self.group, self.eps, self.gate_first = size, group, eps, gate_first
        self.weight = self.new_parameter(size)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.size,)}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.ops.gated_norm(x, gate, self.weight, self.eps, self.group, gate_first=self.gate_first)


class SigmoidGate(Layer):
    """Any shape twice: x * sigmoid(gate)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.ops.sigmoid_gate(x, gate)


class Multiply(Layer):
    """Any shape twice: x * y, rounded once."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ops.multiply(x, y)
