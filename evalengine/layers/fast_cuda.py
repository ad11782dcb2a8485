"""`fast` on CUDA: cuBLAS products, the chosen attention, and the Triton kernels that `native` uses for all else."""

from __future__ import annotations

from evalengine.layers.cuda import CudaOps
from evalengine.layers.fast import FastOps


class CudaFastOps(CudaOps, FastOps):
    """`CudaOps` has the element-wise and row-wise ops, `FastOps` the products and attention."""
