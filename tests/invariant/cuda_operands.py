"""Operands of the CUDA overrides' tests: on the GPU, or on the CPU where there is none."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # The overrides, called directly, also run on the CPU.

ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # The relative error of one rounding.


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
