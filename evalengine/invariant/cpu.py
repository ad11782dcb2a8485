"""The CPU side of the mode: the `exact` kernels, whose float32 result is rounded to the operands' dtype.

Row reductions are those of `kernels.exact_aten_rows`. Operands that `covered` refuses, empty ones and odd arguments go
to torch's kernels, which raise the errors.

Element-wise ops whose vector body and scalar tail differ in torch have one float64 formula for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant.overrides import (
    COVERED_DTYPES,
    Kernel,
    Overrides,
    are_dims,
    aten,
    covered,
    otherwise,
    refused,
    stock,
)
from evalengine.invariant.prepared import PreparedWeights
from evalengine.kernels import exact, exact_aten, exact_aten_rows
from evalengine.kernels import exact_aten_rows as rows
from evalengine.kernels import exact_math as em
from evalengine.kernels.limits import MAX_VOCABULARY


class CPUOverrides(Overrides):
    """The CPU's kernels. A product's left operand (F.linear's input) has two limbs, the right one (the weight) one."""

    device = "cpu"

    def __init__(self, weights: PreparedWeights | None = None) -> None:
        self.weights = PreparedWeights() if weights is None else weights

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        _refuse_beyond(exact_aten.MAX_TERMS, b.shape[-2], "a product over {} terms")
        return exact_aten.product(a, self.weights.right(b)).to(dtype)

    def batched_product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        if b.shape[0] == 1 or b.stride(0) == 0:  # b is a weight that matmul has expanded over a batch
            return self.product(a.reshape(-1, a.shape[-1]), b[0], dtype).view(*a.shape[:-1], b.shape[-1])
        _refuse_beyond(exact_aten.MAX_TERMS, b.shape[-2], "a product over {} terms")
        return exact_aten.batched_product(a, b).to(dtype)

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        _refuse_beyond(MAX_VOCABULARY, x.shape[dim] if x.ndim else 1, "a softmax over {} numbers")
        return exact.softmax(x, dim).to(dtype)

    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        _refuse_beyond(MAX_VOCABULARY, x.shape[dim] if x.ndim else 1, "a log_softmax over {} numbers")
        return exact.log_softmax(x, dim).to(dtype)

    def mean(self, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
        return exact.mean(x, dims, keepdim).to(dtype)

    def kernels(self) -> dict[str, Kernel]:
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        return super().kernels() | ROWS | ELEMENTWISE | {flash: refused(flash)}


def _refuse_beyond(limit: int, length: int, what: str) -> None:
    """Raises ConfigError for a reduction over more numbers than the kernels take."""
    if length > limit:
        raise ConfigError(
            f"{what.format(length)} is longer than the {limit} that set_batch_invariant_mode() adds up on a CPU: "
            "split it, use float64, or leave the mode for it"
        )


def _axes(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """The axes to reduce, ascending; all of them if none is named."""
    named = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    return sorted(axis % x.ndim for axis in named)


def _takes(x: Tensor, dim: int | Sequence[int] | None, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels here take the operand, the axes and the result's dtype."""
    named = [dim] if isinstance(dim, int) else list(dim or [])
    return covered(x) and dtype in (None, *COVERED_DTYPES) and x.ndim > 0 and are_dims(named, x.ndim)


def _sum_dim(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _takes(x, dim, dtype):
        integer = not (x.is_floating_point() or x.is_complex())
        return stock(
            aten.sum.IntList_out, x, dtype or (torch.int64 if integer else x.dtype), x, dim, keepdim, dtype=dtype
        )
    axes = _axes(x, dim)
    numbers, outer_shape = rows.as_rows(x, axes)
    return rows.from_rows(rows.sums(numbers), outer_shape, axes, keepdim).to(dtype or x.dtype)


def _sum(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _sum_dim(x, None, dtype=dtype)


def _vector_norm(
    x: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    # Norms of order inf and -inf are maxima, whose order of comparing cannot matter: torch's own kernel computes them.
    if order not in (1, 2) or not _takes(x, dim, dtype):
        like = dtype or (torch.empty(0, dtype=x.dtype).abs().dtype)
        return stock(aten.linalg_vector_norm.out, x, like, x, order, dim, keepdim, dtype=dtype)
    axes = _axes(x, dim)
    numbers, outer_shape = rows.as_rows(x, axes)
    return rows.from_rows(rows.norms(numbers, int(order)), outer_shape, axes, keepdim).to(dtype or x.dtype)


def _moments(
    x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool, root: bool
) -> tuple[Tensor, Tensor] | None:
    """The variance (or its root) and the mean; None for operands that torch's own kernel must take."""
    correction = 1 if correction is None else correction
    if not _takes(x, dim):
        return None
    axes = _axes(x, dim)
    if prod(x.shape[axis] for axis in axes) <= correction:
        return None
    numbers, outer_shape = rows.as_rows(x, axes)
    spread, mean = rows.moments(numbers, correction, root)
    return (
        rows.from_rows(spread, outer_shape, axes, keepdim).to(x.dtype),
        rows.from_rows(mean, outer_shape, axes, keepdim).to(x.dtype),
    )


def _real(x: Tensor) -> torch.dtype:
    return x.dtype.to_real() if x.is_complex() else x.dtype


def _spread(root: bool) -> Kernel:
    def run(
        x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Tensor:
        moments = _moments(x, dim, correction, keepdim, root)
        if moments is None:
            overload = aten.std.correction_out if root else aten.var.correction_out
            return stock(overload, x, _real(x), x, dim, correction=correction, keepdim=keepdim)
        return moments[0]

    return run


def _spread_and_mean(root: bool) -> Kernel:
    def run(
        x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        moments = _moments(x, dim, correction, keepdim, root)
        if moments is None:
            spread = _spread(root)(x, dim, correction=correction, keepdim=keepdim)
            return spread, stock(aten.mean.out, x, x.dtype, x, dim, keepdim)
        return moments

    return run


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    if not _takes(x, dim):
        return otherwise(aten.logsumexp.default, x, dim, keepdim)
    axes = _axes(x, dim)
    numbers, outer_shape = rows.as_rows(x, axes)
    return rows.from_rows(rows.logsumexp(numbers), outer_shape, axes, keepdim).to(x.dtype)


def _affine(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the kernels take x, and weight and bias, if given, have x's dtype or float32, as torch's norms demand."""
    return covered(x) and all(
        p is None or (p.dtype in (x.dtype, torch.float32) and p.device == x.device) for p in parameters
    )


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = tuple(shape)
    fits = (
        bool(shape) and x.shape[-len(shape) :] == shape and all(p is None or p.shape == shape for p in (weight, bias))
    )
    if not (fits and _affine(x, weight, bias)):
        return otherwise(aten.native_layer_norm.default, x, shape, weight, bias, eps)
    flat_weight, flat_bias = (None if p is None else p.reshape(1, -1) for p in (weight, bias))
    out, mean, scale = rows.normalize(x.reshape(-1, prod(shape)), flat_weight, flat_bias, eps)
    statistics = x.dtype if weight is None else weight.dtype
    outer_shape = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return out.view(x.shape).to(x.dtype), mean.view(outer_shape).to(statistics), scale.view(outer_shape).to(statistics)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    fits = groups > 0 and channels % groups == 0 and x.numel() == n * channels * size
    if not (fits and all(p is None or p.shape == (channels,) for p in (weight, bias)) and _affine(x, weight, bias)):
        return otherwise(aten.native_group_norm.default, x, weight, bias, n, channels, size, groups, eps)
    wide_weight, wide_bias = (
        None if p is None else p.reshape(channels, 1).expand(channels, size).reshape(groups, -1) for p in (weight, bias)
    )
    out, mean, scale = rows.normalize(x.reshape(n * groups, -1), wide_weight, wide_bias, eps, groups)
    statistics = x.dtype if weight is None else weight.dtype
    return out.view(x.shape).to(x.dtype), mean.view(n, groups).to(statistics), scale.view(n, groups).to(statistics)


ROWS: dict[str, Kernel] = {
    "sum": _sum,
    "sum.dim_IntList": _sum_dim,
    "linalg_vector_norm": _vector_norm,
    "var.correction": _spread(root=False),
    "std.correction": _spread(root=True),
    "var_mean.correction": _spread_and_mean(root=False),
    "std_mean.correction": _spread_and_mean(root=True),
    "logsumexp": _logsumexp,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
}


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


ELEMENTWISE: dict[str, Kernel] = {
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
