"""Random operands of the CPU's tests, made from a seed."""

from __future__ import annotations

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
