"""`fast` on CUDA: cuBLAS products, the chosen attention, and the Triton kernels that `native` uses for all else."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels import matmul, matmul_schedules
from evalengine.layers.cuda import CudaOps
from evalengine.layers.fast import FastOps
from evalengine.layers.ops import PreparedWeight

# Up to so many rows our products are quicker than cuBLAS on GPUs where their schedules were measured: for one row of
# Qwen3-0.6B on an H200 cuBLAS takes 9.3 us for q, k and v and 6.4 for the down projection, ours 4.5 and 5.6.
FEW_ROWS = 16


class CudaFastOps(CudaOps, FastOps):
    """`CudaOps` has the element-wise and row-wise ops, `FastOps` the products of many rows and attention."""

    def __init__(self, dtype: torch.dtype, device: torch.device, attention_backend: str) -> None:
        super().__init__(dtype, device, attention_backend)
        self.capturable = attention_backend != "sdpa"  # sdpa groups sequences by the lengths on the host
        tuned = device.type == "cuda" and matmul_schedules.is_tuned(torch.cuda.get_device_name(device))
        self._few_rows = FEW_ROWS if tuned and dtype != torch.float32 else 0

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return matmul.linear(x, weight, bias) if len(x) <= self._few_rows else super().linear(x, weight, bias)

    def lm_head(self, x: Tensor, weight: PreparedWeight) -> Tensor:
        if len(x) <= self._few_rows:
            return matmul.linear(x, weight, out_dtype=torch.float32)
        return super().lm_head(x, weight)
