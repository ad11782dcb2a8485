"""Random operands for the comparisons."""

from __future__ import annotations

import torch
from torch import Tensor


class Random:
    """Seeded normal numbers on the device; every call returns other numbers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)
