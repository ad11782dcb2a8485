"""Rotary position embedding: one table for the model, applied to q and k in every layer.

T tokens, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.layers.base import Layer
from evalengine.layers.ops import Ops


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
