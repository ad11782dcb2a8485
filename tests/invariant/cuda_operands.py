"""Operands of the CUDA overrides' tests: on the GPU, or on the CPU where there is none."""

from __future__ import annotations

from functools import partial

import torch

from tests import random_tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # The overrides, called directly, also run on the CPU.

ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # The relative error of one rounding.


randn = partial(random_tensors.randn, device=DEVICE)
