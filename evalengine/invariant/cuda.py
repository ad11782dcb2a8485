"""The CUDA side of the mode: the `native` Triton kernels. Imported only where there is a CUDA device.

Products are one float32 chain over ascending K (IEEE for float32 operands, whatever `allow_tf32` says), rounded once to
the result's dtype. Row reductions cut a row at absolute columns. So zeros after the end of K, and columns of -inf after
the end of a softmax, change no bit (except the sign of a zero).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from evalengine.invariant import cuda_rows, first_use
from evalengine.invariant.attention import attend, attend_with_gradients
from evalengine.invariant.overrides import Kernel, Overrides, aten, covered, plus_product, refused, stock
from evalengine.kernels import log_softmax, matmul, mean, softmax
from evalengine.kernels.torch_private import current_device, schema_of

_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


class CUDAOverrides(Overrides):
    """CUDA's kernels for the covered ops."""

    device = "cuda"

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return first_use.multiply(partial(matmul.matmul, out_dtype=dtype), a, b)

    def batched_product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return first_use.multiply(partial(matmul.bmm, out_dtype=dtype), a, b)

    def matrix_vector(self, matrix: Tensor, vector: Tensor) -> Tensor:
        # The chain of products over K is the same either way round, and few rows have schedules of their own.
        return self._mm(vector[None], matrix.t())[0]

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return softmax.softmax(x, dim, dtype)

    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return log_softmax.log_softmax(x, dim, dtype)

    def mean(self, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
        return mean.mean(x, dims, keepdim, dtype)

    def kernels(self) -> dict[str, Kernel]:
        kernels = super().kernels() | {op: refused(op) for op in _FUSED_ATTENTION if hasattr(aten, op)}
        kernels |= {"scaled_dot_product_attention": attend, **cuda_rows.KERNELS}
        for op, kernel in (
            ("mm.dtype", self._mm_dtype),
            ("addmm.dtype", self._addmm_dtype),
            ("bmm.dtype", self._bmm_dtype),
            ("baddbmm.dtype", self._baddbmm_dtype),
        ):
            if "dtype" in getattr(aten, op.split(".")[0]).overloads():
                kernels[op] = kernel
        if len(schema_of(aten._fused_rms_norm.default).returns) == 2:  # before torch 2.9 the op is another, for Metal
            kernels["_fused_rms_norm"] = _fused_rms_norm
        return {op: _on_its_device(kernel) for op, kernel in kernels.items()}

    def autograd_kernels(self) -> dict[str, Kernel]:
        return {"scaled_dot_product_attention": attend_with_gradients}

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        plain = beta == alpha == 1 and bias.ndim == 1 and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
        if plain and bias.shape == b.shape[1:] and covered(bias, a, b):
            product = partial(matmul.matmul, round_product=True)  # the kernel's epilogue does what `plus_product` does
            return first_use.multiply(product, a, b, bias)
        return super()._addmm(bias, a, b, beta=beta, alpha=alpha)

    def _mm_dtype(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        if not (_widens(a, b, out_dtype) and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]):
            return stock(aten.mm.dtype_out, a, out_dtype, a, b, out_dtype)
        return self.product(a, b, out_dtype)

    def _bmm_dtype(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        fits = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
        if not (_widens(a, b, out_dtype) and fits):
            return stock(aten.bmm.dtype_out, a, out_dtype, a, b, out_dtype)
        return self.batched_product(a, b, out_dtype)

    def _addmm_dtype(
        self, bias: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return plus_product(bias.to(out_dtype), self._mm_dtype(a, b, out_dtype), beta, alpha)

    def _baddbmm_dtype(
        self, bias: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return plus_product(bias.to(out_dtype), self._bmm_dtype(a, b, out_dtype), beta, alpha)


def _widens(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    return covered(a, b) and out_dtype in (a.dtype, torch.float32)


def _fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """`F.rms_norm` on CUDA: (normed, 1 / rms), by torch's own formula in float32, rounded once at the end.

    normed = x * rsqrt(mean(x^2) + eps) * weight; eps None stands for the accumulation dtype's epsilon.
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = tuple(range(-len(normalized_shape), 0))
    scale = torch.rsqrt((wide * wide).mean(dims, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    normed = wide * scale
    return (normed if weight is None else normed * weight).to(x.dtype), scale


def _on_its_device(kernel: Callable[..., Any]) -> Kernel:
    """Makes the operands' device current while a kernel runs: Triton launches on the current device, torch's own
    kernels on their operands'."""

    @wraps(kernel)
    def launch(first: Tensor, *args: object, **kwargs: object) -> Any:
        if not first.is_cuda or first.get_device() == current_device():
            return kernel(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return kernel(first, *args, **kwargs)

    return launch
