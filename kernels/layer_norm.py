"""Layer norm, alone or with the residual stream's sum before it.

    H hidden size, rows everything before it.

Rounding points (NUMERICS.md, `native`): the residual stream's sum is rounded and normed as rounded; d = x - mean(x) in
float32, d * rsqrt(mean(d^2) + eps) times the weight, plus the bias if there is one, each in float32, and one rounding.
Both means are integer sums (`row_sum`), so any tile, any number of warps and any fusion give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math, row_sum
from evalengine.kernels.rms_norm import load_rows, norm_rows


@triton.jit
def normalize(x, mask, weight, bias, n, eps, DTYPE: tl.constexpr, BIAS: tl.constexpr):
    """float32 tile x [rows, columns] (masked columns 0), weight and bias that broadcast to it, n columns -> DTYPE."""
    deviation = tl.where(mask, x - row_sum.mean(x, n, 1)[:, None], 0.0)
    rstd = device_math.rsqrt(row_sum.mean_square(deviation, n, 1) + eps)
    normed = deviation * rstd[:, None] * weight.to(tl.float32)
    if BIAS:
        normed = normed + bias.to(tl.float32)
    return normed.to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, x_stride, x_inner_stride, residual_stride,
    residual_inner_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    device_math.after_previous_kernel()
    x, out, column, mask = load_rows(
        x_ptr, residual_ptr, sum_ptr, rows, x_stride, x_inner_stride, residual_stride, residual_inner_stride,
        H, BLOCK, INNER, ROWS, ADD,
    )  # fmt: skip
    if HEADS == 1:
        weight = tl.load(weight_ptr + column, column < H, 0.0)[None, :]
        bias = tl.load(bias_ptr + column, column < H, 0.0)[None, :]
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        place = (row % HEADS)[:, None] * H + column[None, :]
        weight, bias = tl.load(weight_ptr + place, mask, 0.0), tl.load(bias_ptr + place, mask, 0.0)
    tl.store(out_ptr + out, normalize(x.to(tl.float32), mask, weight, bias, H, eps, x.dtype, BIAS), mask)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    schedule: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    vectors, by_head = (weight, weight if bias is None else bias), weight.ndim == 2
    constants = (bias is not None, len(weight) if by_head else 1)
    return norm_rows(_layer_norm_kernel, x, residual, vectors, eps, schedule, constants, by_head=by_head)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, _schedule: tuple[int, int] | None = None
) -> Tensor:
    """x [..., H] of any leading strides, weight and bias [H] of x's dtype -> contiguous [..., H].

    For x [..., G, H] weight and bias may be [G, H], a row for each head. A row of x that holds an infinity or a NaN
    becomes NaN as a whole; one whose variance is beyond float32 becomes the bias. H is at most 16384
    (`limits.MAX_TERMS`), else ValueError. `_schedule` is (rows a program, warps), for tests and verify: it cannot
    change a bit.
    """
    return _launch(x, None, weight, bias, eps, _schedule)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    _schedule: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """x, residual [..., H] -> (layer_norm of their sum, the sum), the sum rounded to the dtype, normed as rounded."""
    return _launch(x, residual, weight, bias, eps, _schedule)
