"""Sums over a row whose order cannot matter: the terms become 64-bit integers on one grid, and integers are added.

`native`'s row reductions (RMSNorm, mean, softmax, log_softmax) are made of these. A tree of float32 sums would be tied
to one tile shape and one register layout, which Triton picks by alignment; integer sums leave the schedule free: any
block size, any number of warps, fused or not, give the same bits. The price is one conversion for each element (an SM
of Hopper does 16 a clock, while its memory delivers about 5 elements).

The grid is 2^-44. `limits.MAX_TERMS` terms of magnitude 16 stay below 2^63.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_fixed(x):
    """float32, |x| <= 16 -> int64 on the grid 2^-44, toward zero (exact for |x| >= 2^-20).

    An infinity or a NaN becomes an arbitrary integer; the caller must make that row NaN, as `scale_up` does.
    """
    return (x * 17592186044416.0).to(tl.int64)  # times 2^44, exactly


@triton.jit
def from_fixed(total):
    """int64 sum of `to_fixed` terms -> float32, rounded once."""
    return total.to(tl.float32) * 5.684341886080802e-14  # times 2^-44, exactly


@triton.jit
def row_exponent(x, axis: tl.constexpr):
    """float32 -> int32: the biased exponent of the largest magnitude along `axis`; 255 if an inf or NaN is there.

    It is an integer maximum of the bits, which depends on no order and, unlike a float maximum, does not drop NaN.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis) >> 23


@triton.jit
def scale_down(exponent):
    """2^-(e - 127) for e from `row_exponent`: brings magnitudes below 2 (below 4 at the top of the range)."""
    e = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_up(exponent):
    """2^(e - 127), the inverse of `scale_down`; NaN for e = 255, so that a non-finite row gives NaN."""
    e = tl.minimum(tl.maximum(exponent, 1), 253)
    up = (e << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == 255, float("nan"), up)


@triton.jit
def mean(x, n, axis: tl.constexpr):
    """float32 rows (masked columns 0), n columns (an int or a constexpr) -> float32 mean; NaN for a non-finite row.

    The numbers are summed exactly on the grid 2^-44 of the row's largest magnitude, divided by n, and scaled back.
    """
    exponent = row_exponent(x, axis)
    total = tl.sum(to_fixed(x * tl.expand_dims(scale_down(exponent), axis)), axis)
    return tl.div_rn(from_fixed(total), tl.full(total.shape, n, tl.float32)) * scale_up(exponent)


@triton.jit
def mean_square(x, n, axis: tl.constexpr):
    """float32 rows (masked columns 0), n columns (an int or a constexpr) -> float32 mean of the squares.

    The squares are rounded to float32 (exact for bf16 and fp16 values), summed exactly on the grid 2^-44 of the row's
    largest magnitude, divided by n, and scaled back: infinity where that is beyond float32, as in eager code.
    """
    exponent = tl.maximum(row_exponent(x, axis), 23)  # keeps 2^22 * scale_down finite; squares there are below 2^-149
    shifted = x * tl.expand_dims(scale_down(exponent) * 4194304.0, axis)  # times 2^22: squares, times 2^44
    total = tl.sum((shifted * shifted).to(tl.int64), axis)
    up = scale_up(exponent)
    return tl.div_rn(from_fixed(total), tl.full(total.shape, n, tl.float32)) * up * up
