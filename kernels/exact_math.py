"""Float64 arithmetic that has the same bits on every machine: the ground under the `exact` level.

It uses only +, -, * and powers of two built from bits, each as a torch op of its own (`addcmul`, `lerp` and `alpha=`
may fuse), comparisons, max reductions, and sums whose every partial sum is exactly representable. IEEE 754 fixes their
results, whatever the vector width, the thread split or the library. torch's own exp, log, sqrt, sin and division by a
tensor are not used: on CPU and GPU they differ in 0.1-35 % of the values.

Rounding to a grid of unit u is `(x + c) - c` with c = 1.5 * 2^52 * u: the sum is in [2^52 u, 2^53 u), where float64
is spaced by u, so it rounds to a multiple of u, ties to even, as rint(x / u) * u does, in two passes without a scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

TILE = 131072  # elements of a float64 temporary: 1 MB, of which two threads hold half each, so that it stays in L2
MIN_NORMAL = 2.0**-126  # the smallest normal float32
_BELOW_MIN_NORMAL = MIN_NORMAL * (1.0 - 2.0**-53)
_LOG2_E = 1.4426950408889634
_EXP_CLAMP = 700.0  # 2^(700 log2 e) is a normal float64, and far outside float32
_EXP_MAGIC = 1.5 * 2.0**52 + 1023.0  # rounds to an integer n and leaves n + 1023, an exponent field, in the low bits
# 2^f - 1 = f * polynomial(f) on [-0.5, 0.5]: minimax, relative error 2.0e-9 (1/60 of an ulp of float32), exact at 0.
_EXP2 = (
    0.00015353361884358659,
    0.0013398874422261738,
    0.00961843735783453,
    0.05550332471100157,
    0.24022647913626463,
    0.6931472028550828,
)
# This constant minus the bits of x approximates 1/x within 13 %; each Newton step squares the error.
_RECIPROCAL_SEED = 0x7FDE623822FC16E6
_PI_OVER_2 = (  # 33 bits each but the last: n * part is exact for n < 2^20
    1.5707963267341256,
    6.077100506303966e-11,
    2.0222662487959506e-21,
)
_ROUND_TO_INTEGER = 1.5 * 2.0**52
# Taylor: on |x| <= pi/4 the first term left out is below 3e-14 of the result.
_SIN = (1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6)
_COS = (-1 / 87178291200, 1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2)
# Taylor, without its first term x: on |x| <= 1/4 the first term left out is below 6e-12 of the result.
_TANH = (21844 / 6081075, -1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3)
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_LN2_HI = 0.6931471803691238  # 33 bits: k * hi is exact
_LN2_LO = 1.9082149292705877e-10
SUM_BITS = 44  # A row's sum keeps this many bits of each number, counted from the exponent of the row's largest.
_SUM_UNIT = 2.0**-SUM_BITS
_SUM_MAGIC = 1.5 * 2.0**52 * _SUM_UNIT
_SUM_PIECE = 512  # at most 512 numbers in [0, 1] on a grid of 2^-44 add exactly in float64
_LOW_BITS = 30
_INTEGER_OF = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_WITHOUT_SIGN = {integer: torch.iinfo(integer).max for integer in _INTEGER_OF.values()}


def tiles(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows, so that a tile holds about `TILE` elements."""
    step = max(1, TILE // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def widen(x: Tensor) -> Tensor:
    """A float64 copy of a bf16, fp16 or float32 tensor, its float32 subnormals flushed to zero (and -0 to +0).

    Flushing is explicit because a thread may run with denormals-are-zero set.
    """
    return hardshrink(x.to(torch.float64), _BELOW_MIN_NORMAL)


def round_float32(x: Tensor) -> Tensor:
    """float64 -> float32, to nearest even; below 2^-126 in magnitude becomes +0, as does -0. NaN stays NaN."""
    return hardshrink(x, _BELOW_MIN_NORMAL).to(torch.float32)


def store_float32(x: Tensor, out: Tensor) -> None:
    """`round_float32(x)` written into the float32 tensor `out`."""
    out.copy_(hardshrink(x, _BELOW_MIN_NORMAL))


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits; int64 exponents in [-1022, 1023]."""
    return (exponent + 1023).bitwise_left_shift_(52).view(torch.float64)


def magnitude(x: Tensor) -> Tensor:
    """|x| as a new tensor, from bits: NaN stays NaN."""
    integer = _INTEGER_OF[x.dtype]
    return x.view(integer).bitwise_and(_WITHOUT_SIGN[integer]).view(x.dtype)


def largest(size: Tensor, dim: int = -1) -> Tensor:
    """max of `magnitude(x)` along `dim` (keepdim, size 1), float64; NaN if the row holds a NaN.

    Taken on the bits as integers: 163 us against 1126 us for abs().amax() on a bf16 [14400, 64] (one thread).
    """
    return size.view(_INTEGER_OF[size.dtype]).amax(dim, keepdim=True).view(size.dtype).to(torch.float64)


def row_absmax(x: Tensor, dim: int = -1) -> Tensor:
    """max |x| along `dim` (keepdim, size 1), float64; NaN if the row holds a NaN."""
    integer = _INTEGER_OF[x.dtype]
    size = x.view(integer).bitwise_and(_WITHOUT_SIGN[integer])
    return size.amax(dim, keepdim=True).view(x.dtype).to(torch.float64)


def exponent(absmax: Tensor) -> Tensor:
    """e (int64) with 2^(e-1) <= absmax < 2^e, as frexp has it; zero and subnormals count as 2^-126."""
    return absmax.view(torch.int64).bitwise_right_shift(52).sub_(1022).clamp_(min=-125)


def grid(absmax: Tensor, bits: int) -> Tensor:
    """The constant c that rounds to multiples of u = 2^(e-bits), e the exponent of `absmax`: `(x + c) - c`.

    NaN where `absmax` is infinite or NaN, so that such a row becomes NaN as a whole. c = 1.5 * 2^52 * u, from bits.
    """
    field = absmax.view(torch.int64).bitwise_and(0x7FF << 52).clamp_(min=(1023 - 126) << 52)
    return field.add_((53 - bits << 52) | (1 << 51)).view(torch.float64).add_(absmax * 0.0)


def split_limbs(x: Tensor, absmax: Tensor, bits: int, out: Tensor) -> Tensor:
    """float64 x [..., M, K] into `out` [..., 2, M, K]: hi, multiples of u = 2^(e-bits), and lo, of u * 2^-(bits+1).

    As integers: rint(x / u) and rint((x / u - hi / u) * 2^(bits+1)), both at most 2^bits; e is the exponent of `absmax`
    (broadcastable to x).
    """
    c = grid(absmax, bits)
    hi, lo = out.unbind(-3)
    torch.add(x, c, out=hi)
    hi.sub_(c)
    c = c * 2.0 ** -(bits + 1)
    torch.sub(x, hi, out=lo)
    lo.add_(c).sub_(c)
    return out


class ExactSum:
    """The sum of tensors whose elements are integers of at most 2^53 times a unit u: exact, then rounded once.

    So the total is the same number however the sum was cut into parts. From the second part on, each part is split at
    the grid of 2^26 u: the upper and the lower halves add exactly for up to 2^26 parts.
    """

    def __init__(self, grid_of_unit: Callable[[], Tensor]) -> None:
        """grid_of_unit: returns the c that rounds to multiples of u (`grid`), and broadcasts to the parts; called only
        if there is a second part."""
        self._grid_of_unit = grid_of_unit
        self._high: Tensor | None = None
        self._low: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Adds a part, which is referenced and overwritten."""
        if self._high is None:
            self._high = part
            return
        if self._low is None:
            self._c = self._grid_of_unit() * 2.0**26
            self._high, self._low = self._halves(self._high)
        high, low = self._halves(part)
        self._high.add_(high)
        self._low.add_(low)

    def total(self) -> Tensor:
        """The sum, float64, of the parts' shape."""
        assert self._high is not None, "an exact sum needs at least one part"
        return self._high if self._low is None else self._high.add_(self._low)

    def _halves(self, part: Tensor) -> tuple[Tensor, Tensor]:
        high = (part + self._c).sub_(self._c)
        return high, part.sub_(high)


def row_sum(x: Tensor, c: Tensor) -> Tensor:
    """Sum over the last axis (keepdim), exact and rounded once, of x on the grid of c, whose unit is 2^-44 of the
    largest.

    512 such numbers add exactly in float64; x is overwritten.
    """
    x.add_(c).sub_(c)
    if x.shape[-1] <= _SUM_PIECE:
        return x.sum(-1, keepdim=True)
    whole = x.shape[-1] // _SUM_PIECE
    pieces = x[..., : whole * _SUM_PIECE].unflatten(-1, (whole, _SUM_PIECE)).sum(-1)
    pieces = torch.cat((pieces, x[..., whole * _SUM_PIECE :].sum(-1, keepdim=True)), -1)
    c = c * 2.0**26
    high = (pieces + c).sub_(c)
    return pieces.sub_(high).sum(-1, keepdim=True).add_(high.sum(-1, keepdim=True))


def row_sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x^2 over the last axis (keepdim), exact and rounded once, of the squares (rounded to float64) on the grid
    of 2^(2e-44), e the exponent of the row's largest magnitude. A row with an infinity or a NaN becomes NaN."""
    absmax = row_absmax(x)
    c = pow2(exponent(absmax) * 2 + (52 - SUM_BITS)).mul_(1.5).add_(absmax * 0.0)  # 1.5 * 2^52 * 2^(2e-44)
    return row_sum(x * x, c)


def unit_sum(p: Tensor) -> Tensor:
    """Sum over the last axis of numbers in [0, 1], each rounded to a multiple of 2^-44: int64, in units of 2^-44.

    The sum is exact in any order. 2^19 ones wrap to -2^63, which `unit_total` undoes. Pieces of 512 are added in
    float64, which is exact and spares an element-wise conversion to int64.
    """
    p = (p + _SUM_MAGIC).sub_(_SUM_MAGIC)
    whole = p.shape[-1] // _SUM_PIECE
    pieces = p[..., : whole * _SUM_PIECE].unflatten(-1, (whole, _SUM_PIECE)).sum(-1)
    rest = p[..., whole * _SUM_PIECE :].sum(-1, keepdim=True)
    return torch.cat((pieces, rest), -1).mul_(1 / _SUM_UNIT).to(torch.int64).sum(-1)


def unit_total(total: Tensor) -> Tensor:
    """The sum of some `unit_sum`s, added up as int64, as float64."""
    return total.to(torch.float64).abs_().mul_(_SUM_UNIT)


class UnitSum:
    """The sum of `unit_sum`s, rounded once to float64: `unit_total` of them, where int64 holds that.

    Upper and lower bits are added apart, in int64: it takes 2^39 numbers to wrap.
    """

    def __init__(self) -> None:
        self._high: Tensor | None = None
        self._low: Tensor | None = None

    def add(self, p: Tensor) -> None:
        """Adds the numbers in [0, 1] of p [*shape, n], n below 2^19."""
        low = unit_sum(p)
        high = low.bitwise_right_shift(_LOW_BITS)
        low.bitwise_and_((1 << _LOW_BITS) - 1)
        if self._high is not None and self._low is not None:
            high.add_(self._high)
            low.add_(self._low)
        self._high, self._low = high, low

    def total(self) -> Tensor:
        """The sum, float64 [*shape]."""
        assert self._high is not None and self._low is not None, "a sum needs at least one part"
        high = self._high.to(torch.float64).mul_(float(1 << _LOW_BITS))
        return high.add_(self._low.to(torch.float64)).mul_(_SUM_UNIT)


def exp(x: Tensor) -> Tensor:
    """e^x, float64, relative error below 2.1e-9; arguments are clamped to [-700, 700]. exp(0) is 1. NaN stays NaN."""
    f = x.clamp(-_EXP_CLAMP, _EXP_CLAMP).mul_(_LOG2_E)
    n = f + _EXP_MAGIC
    f.sub_(n - _EXP_MAGIC)
    y = f * _EXP2[0]
    for coefficient in _EXP2[1:]:
        y.add_(coefficient).mul_(f)
    y.add_(1.0)
    n.view(torch.int64).bitwise_left_shift_(52)
    return y.mul_(n)


def reciprocal(x: Tensor) -> Tensor:
    """1/x for 2^-1000 < |x| < 2^1000, float64, relative error below 1e-14: four Newton steps from a seed of bits."""
    y = x.view(torch.int64).neg().add_(_RECIPROCAL_SEED).view(torch.float64)
    for _ in range(4):
        y.mul_((x * y).neg_().add_(2.0))
    return y


def rsqrt(x: Tensor) -> Tensor:
    """x^-0.5 for 0 < x < 2^1000, float64, relative error below 1e-13: six Newton steps from an exponent seed.

    x = 0 gives a large finite number, so that a zero row of a norm stays zero.
    """
    half = x.view(torch.int64).bitwise_right_shift(52).sub_(1023).bitwise_right_shift_(1)  # x = 4^half * [1, 4)
    y = pow2(half.neg_()).mul_(0.7)
    half_x = x * 0.5
    for _ in range(6):
        y.mul_((half_x * y).mul_(y).neg_().add_(1.5))
    return y


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float64."""
    return reciprocal(exp(-x).add_(1.0))


def tanh(x: Tensor) -> Tensor:
    """tanh x, float64, relative error below 5e-9, odd: 2 sigmoid(2 |x|) - 1; below 1/4, where it cancels, a series."""
    magnitude = x.abs().clamp_(max=20.0)
    large = sigmoid(magnitude * 2.0).mul_(2.0).sub_(1.0)
    square = x * x
    series = square * _TANH[0]
    for coefficient in _TANH[1:]:
        series.add_(coefficient).mul_(square)
    small = series.mul_(x).add_(x)
    return torch.where(magnitude < 0.25, small, torch.where(x < 0, -large, large))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of a positive normal float64, relative error below 1e-15 away from 1 and near it.

    x = 2^k m, m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series to s^19.
    """
    bits = x.view(torch.int64)
    k = (bits - _SQRT_HALF_BITS).bitwise_right_shift_(52)
    m = (bits - k.bitwise_left_shift(52)).view(torch.float64)
    s = (m - 1.0).mul_(reciprocal(m + 1.0))
    square = s * s
    series = square * (1 / 19)
    for odd in range(17, 1, -2):
        series.add_(1 / odd).mul_(square)
    s.mul_(2.0)
    series.mul_(s).add_(s)
    power = k.to(torch.float64)
    return (power * _LN2_LO).add_(series).add_(power * _LN2_HI)


def _quadrant(x: Tensor) -> tuple[Tensor, Tensor]:
    """x - n pi/2 in [-pi/4, pi/4], and n as int64. x is a float32 value, |x| < 2^20: Cody and Waite's reduction.

    Each n * part is exact, and so are the first two differences.
    """
    n = (x * 0.6366197723675814).add_(_ROUND_TO_INTEGER).sub_(_ROUND_TO_INTEGER)
    r = x
    for part in _PI_OVER_2:
        r = r - n * part
    return r, n.to(torch.int64)


def _sin_cos(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sin and cos of the reduced argument, and the quadrant."""
    r, n = _quadrant(x)
    square = r * r
    sine, cosine = square * _SIN[0], square * _COS[0]
    for coefficient in _SIN[1:]:
        sine.add_(coefficient).mul_(square)
    for coefficient in _COS[1:]:
        cosine.add_(coefficient).mul_(square)
    return sine.mul_(r).add_(r), cosine.add_(1.0), n


def sin(x: Tensor) -> Tensor:
    """sin x in float64 for float32 values x, |x| < 2^20 radians."""
    sine, cosine, n = _sin_cos(x)
    value = torch.where(n.bitwise_and(1) == 1, cosine, sine)
    return torch.where(n.bitwise_and(2) == 2, -value, value)


def cos(x: Tensor) -> Tensor:
    """cos x in float64 for float32 values x, |x| < 2^20 radians."""
    sine, cosine, n = _sin_cos(x)
    value = torch.where(n.bitwise_and(1) == 1, sine, cosine)
    return torch.where((n + 1).bitwise_and(2) == 2, -value, value)
