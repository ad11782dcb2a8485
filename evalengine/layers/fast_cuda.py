"""`fast` on CUDA: cuBLAS products, the chosen attention, and the Triton kernels that `native` uses for all else."""

from __future__ import annotations

import torch

from evalengine.layers.cuda import CudaOps
from evalengine.layers.fast import FastOps


class CudaFastOps(CudaOps, FastOps):
    """`CudaOps` has the element-wise and row-wise ops, `FastOps` the products and attention."""

    def __init__(self, dtype: torch.dtype, device: torch.device, attention_backend: str) -> None:
        super().__init__(dtype, device, attention_backend)
        self.capturable = attention_backend != "sdpa"  # which cuts its groups by the lengths on the host
