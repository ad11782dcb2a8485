"""The CPU side of the mode: the `exact` kernels, their float32 result rounded to the operands' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.invariant.overrides import Kernel, Overrides, aten, covered, refused, stock
from evalengine.kernels import exact
from evalengine.kernels import exact_math as em


class CPUOverrides(Overrides):
    """In a product the left operand (F.linear's input) takes two limbs, the right one (the weight) one."""

    device = "cpu"

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return exact.linear(a, exact.quantize_weight(b.t())).to(dtype)

    def batched_product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return exact.bmm(a, b).to(dtype)

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return exact.softmax(x, dim).to(dtype)

    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return exact.log_softmax(x, dim).to(dtype)

    def mean(self, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
        return exact.mean(x, dims, keepdim).to(dtype)

    def kernels(self) -> dict[str, Kernel]:
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        return super().kernels() | {"silu": _silu, "sigmoid": _sigmoid, "rsqrt": _rsqrt, flash: refused(flash)}


def _float_of(x: Tensor) -> torch.dtype:
    """The dtype torch gives an element-wise float function of x."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()


def _silu(x: Tensor) -> Tensor:
    if not covered(x):
        return stock(aten.silu.out, x, _float_of(x), x)
    return exact.silu(x).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    if not covered(x):
        return stock(aten.sigmoid.out, x, _float_of(x), x)
    return exact.elementwise(em.sigmoid, x).to(x.dtype)


def _rsqrt(x: Tensor) -> Tensor:
    if not covered(x) or x.dtype == torch.float32:  # float32: a square root and a division, both IEEE 754
        return stock(aten.rsqrt.out, x, _float_of(x), x)
    return aten.rsqrt.out(x.float(), out=torch.empty(0)).to(x.dtype)
