"""Element-wise ops whose vector body and scalar tail differ on CPUs in torch; here one float64 formula serves both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evalengine.invariant.overrides import Kernel, aten, covered, stock
from evalengine.kernels import exact, exact_aten_rows
from evalengine.kernels import exact_math as em


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
    if not covered(x) or x.dtype == torch.float32:  # in float32 it is a square root and a division, both IEEE 754
        return stock(aten.rsqrt.out, x, _float_of(x), x)
    return aten.rsqrt.out(x.float(), out=torch.empty(0)).to(x.dtype)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if not covered(x) or approximate not in ("none", "tanh"):
        return stock(aten.gelu.out, x, _float_of(x), x, approximate=approximate)
    return exact.elementwise(exact_aten_rows.gelu_tanh if approximate == "tanh" else exact_aten_rows.gelu, x).to(
        x.dtype
    )


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    if not (covered(x) and -x.ndim <= dim < x.ndim and x.shape[dim] % 2 == 0):
        return stock(aten.glu.out, x, x.dtype, x, dim)
    return exact.elementwise(lambda a, b: em.sigmoid(b).mul_(a), *x.chunk(2, dim)).to(x.dtype)


def _in_place(kernel: Callable[..., Tensor], overload: Kernel) -> Kernel:
    """The in-place form of a kernel; `overload` is torch's own op with an `out=`, for operands that are not covered."""

    def run(x: Tensor, **options: object) -> Tensor:
        if not covered(x):
            overload(x, **options, out=x)
            return x
        return x.copy_(kernel(x, **options))

    return run


KERNELS: dict[str, Kernel] = {
    "silu": _silu,
    "silu_": _in_place(_silu, aten.silu.out),
    "sigmoid": _sigmoid,
    "sigmoid_": _in_place(_sigmoid, aten.sigmoid.out),
    "rsqrt": _rsqrt,
    "rsqrt_": _in_place(_rsqrt, aten.rsqrt.out),
    "glu": _glu,
    "gelu": _gelu,
    "gelu_": _in_place(_gelu, aten.gelu.out),
}
