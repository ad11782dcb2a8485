"""Layers that work on each token's row by itself: RMS norm, the gated SiLU of the feed-forward block, and RoPE.

T tokens, H features of the residual stream, I of the feed-forward block (h and i: this rank's), D head_dim. RoPE has
one table for the model, applied to q and k in every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.layers.base import Layer
from evalengine.layers.ops import Ops


class RMSNorm(Layer):
    """[..., H] -> [..., H]: x / sqrt(mean(x^2) + eps) * weight. Every rank has the whole weight."""

    def __init__(self, ops: Ops, size: int, eps: float) -> None:
        super().__init__(ops)
        self.size, self.eps = size, eps
        self.weight = self.new_parameter(size)

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.size,)}

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class AddRMSNorm(RMSNorm):
    """x and residual [T, H] -> the norm of their rounded sum, and that sum itself, which the residual stream goes on
    with. Of x this rank's columns [T, h] will do: the others' are gathered."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if x.shape[1] < residual.shape[1]:
            return self.ops.gather_add_rms_norm(x, residual, self.weight, self.eps)
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class SiluAndMul(Layer):
    """[T, 2 i] -> [T, i], or all ranks' [T, I] if the gathers are fused: silu(first half) * second half."""

    def forward(self, gate_up: Tensor) -> Tensor:
        if self.ops.fuses_gathers:
            return self.ops.gather_silu_and_mul(gate_up)
        return self.ops.silu_and_mul(gate_up)


def rope_table(
    inv_freq: Tensor, max_positions: int, scaling: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The table of inverse frequencies, float32 [D/2]: cos and sin [max_positions, D/2] of the float32 angles, times
    `scaling` in float32, rounded to `dtype`."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq.to(device)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


class RopeTable(Layer):
    """cos and sin of every position. The table is made once; a step gathers its rows once for all layers."""

    def __init__(self, ops: Ops, inv_freq: Tensor, scaling: float = 1.0) -> None:
        super().__init__(ops)
        self.inv_freq, self.scaling = inv_freq, scaling
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None

    def build(self, max_positions: int) -> None:
        """Makes the rows for positions below `max_positions`."""
        self.cos, self.sin = self.ops.rope_table(self.inv_freq, max_positions, self.scaling)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cos, sin [T, D / 2]."""
        assert self.cos is not None and self.sin is not None, "build() comes first"
        return self.cos[positions], self.sin[positions]


class Rope(Layer):
    """Rotates [T, heads, D] by the step's cos and sin, [T, D / 2]."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.ops.rope(x, cos, sin)
