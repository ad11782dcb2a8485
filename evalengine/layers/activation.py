"""The gated SiLU of the feed-forward block."""

from __future__ import annotations

from torch import Tensor

from evalengine.layers.base import Layer


class SiluAndMul(Layer):
    """[T, 2 I] -> [T, I]: silu(first half) * second half."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.ops.silu_and_mul(gate_up)
