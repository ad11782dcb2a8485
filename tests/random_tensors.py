"""Random tensors that are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
    """Draws from the normal distribution in float32, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
