"""RMS norm, by itself or after the residual stream's sum."""

from __future__ import annotations

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
    """[T, H], [T, H] -> the norm of their rounded sum, and that sum itself, which the residual stream goes on with."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
