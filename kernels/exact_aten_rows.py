"""Row reductions of the aten mode on CPUs: sums of a row are sums of integers, so neither order nor padding counts.

    n rows, K numbers in a row, e the exponent of a row's largest magnitude.

    sum        integers of 40 bits: rint(x 2^(40-e)), added exactly; 2^22 of them, more are cut at absolute multiples of
               2^22 and the parts added in ascending order in float64
    moments    mean = sum / K; d = x - mean in float64; the sum of (d 2^-e_d)^2, likewise
    logsumexp  max + log(sum of exp(z - max)), each exp an integer of 44 bits, as in `exact.log_softmax`

Everything else is float64 arithmetic of `exact_math`, rounded to float32 once at the end. So zeros next to a row change
neither its sum nor its norm, and -inf next to it not its logsumexp. Infinities and NaN give what IEEE 754 gives in any
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em

SUM_BITS = 40
MAX_TERMS = 1 << 22  # numbers of SUM_BITS bits, whose sum stays below 2^62
_PIECE = 1 << (53 - SUM_BITS)  # numbers of SUM_BITS bits that add exactly in float64
_EXP_TERMS = 1 << 18  # exponentials of 44 bits that are added in one int64
_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654
# log(erfc(z) e^(z^2) / t) with t = 2 / (2 + z), Chebyshev in 2 t - 1 on (0, 1], the first coefficient halved:
# absolute error 1.1e-10.
_ERFC = (
    -1.3026537197817094 / 2, 0.6419697923564903, 0.019476473204185826, -0.009561514786808624, -0.0009465953444820422,
    0.000366839497852764, 4.2523324806908196e-05, -2.0278578112537596e-05, -1.6242900046409816e-06,
    1.3036558355722257e-06, 1.562644173202031e-08, -8.523809592582218e-08, 6.52905445015427e-09, 5.059343485128249e-09,
    -9.913641474473215e-10, -2.2736512931626365e-10,
)  # fmt: skip


def integer_total(total: Tensor) -> Tensor:
    """int64 -> float64, rounded to nearest even by one IEEE 754 addition: both of its halves are exact."""
    low = total.bitwise_and(0xFFFFFFFF)
    return (total - low).to(torch.float64).add_(low.to(torch.float64))


def as_rows(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, list[int]]:
    """x as [n, K], each row the numbers over `dims` (not negative, ascending), and the shape of the other dims."""
    outer_shape = [size for axis, size in enumerate(x.shape) if axis not in dims]
    moved = x.movedim(list(dims), list(range(x.ndim - len(dims), x.ndim)))
    return moved.reshape(prod(outer_shape), prod(x.shape[axis] for axis in dims)), outer_shape


def from_rows(values: Tensor, outer_shape: list[int], dims: Sequence[int], keepdim: bool) -> Tensor:
    """[n] -> `outer_shape`, with ones at `dims` if keepdim."""
    result = values.view(outer_shape)
    for axis in dims if keepdim else ():
        result = result.unsqueeze(axis)
    return result


def _wide_sums(wide: Tensor) -> Tensor:
    """float64 [n, K] -> float64 [n, 1]."""
    absmax = em.row_absmax(wide)
    c = em.grid(absmax, SUM_BITS)
    unit = em.exponent(absmax).sub_(SUM_BITS).clamp_(max=900)
    down, up = em.pow2(-unit), em.pow2(unit)
    sums: Tensor | None = None
    for part in wide.split(MAX_TERMS, -1):
        q = (part + c).sub_(c)
        whole = q.shape[-1] // _PIECE * _PIECE
        pieces = q[:, :whole].unflatten(-1, (whole // _PIECE, _PIECE)).sum(-1)
        rest = q[:, whole:].sum(-1, keepdim=True)
        total = torch.cat((pieces, rest), -1).mul_(down).to(torch.int64).sum(-1, keepdim=True)
        value = integer_total(total).mul_(up)
        sums = value if sums is None else sums.add_(value)
    assert sums is not None
    finite = absmax < torch.inf
    if not finite.all():
        # The sum of a row with an infinity or a NaN is the same in any order.
        sums = torch.where(finite, sums, wide.sum(-1, keepdim=True))
    return sums


def _wide_squares(wide: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [n, K] (not changed) -> s float64 [n, 1] and 2^e: the sum of squares is s 4^e."""
    exponent = em.exponent(em.row_absmax(wide)).clamp_(max=900)
    scaled = wide * em.pow2(-exponent)
    return _wide_sums(scaled.mul_(scaled)), em.pow2(exponent)


def _root(x: Tensor) -> Tensor:
    return x * em.rsqrt(x)


def sums(x: Tensor) -> Tensor:
    """[n, K] -> float32 [n]. K at least 1, as everywhere below."""
    out = torch.empty(x.shape[0], dtype=torch.float32)
    for tile in em.tiles(*x.shape):
        em.store_float32(_wide_sums(em.widen(x[tile])).squeeze(-1), out[tile])
    return out


def norms(x: Tensor, order: int) -> Tensor:
    """[n, K] -> float32 [n]: sum of |x| (order 1), or the root of the sum of x^2 (order 2)."""
    out = torch.empty(x.shape[0], dtype=torch.float32)
    for tile in em.tiles(*x.shape):
        wide = em.widen(x[tile])
        if order == 1:
            value = _wide_sums(wide.abs_())
        else:
            squares, scale = _wide_squares(wide)
            value = _root(squares).mul_(scale)
        em.store_float32(value.squeeze(-1), out[tile])
    return out


def _centred(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Subtracts their means from the rows of float64 [n, K], in place; returns the rows and the means [n, 1]."""
    mean = _wide_sums(wide).mul_(1.0 / wide.shape[-1])
    return wide.sub_(mean), mean


def moments(x: Tensor, correction: float, root: bool) -> tuple[Tensor, Tensor]:
    """[n, K] -> float32 [n] variance (or its root), the sum of squares over K - correction > 0; float32 [n] mean."""
    spread = torch.empty(x.shape[0], dtype=torch.float32)
    means = torch.empty_like(spread)
    for tile in em.tiles(*x.shape):
        centred, mean = _centred(em.widen(x[tile]))
        squares, scale = _wide_squares(centred)
        squares.mul_(1.0 / (x.shape[-1] - correction))
        value = _root(squares).mul_(scale) if root else squares.mul_(scale).mul_(scale)
        em.store_float32(value.squeeze(-1), spread[tile])
        em.store_float32(mean.squeeze(-1), means[tile])
    return spread, means


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """[n, K] -> float32 (x - mean) rsqrt(variance + eps) weight + bias, mean [n], 1 / root [n].

    weight and bias are [groups, K]; row i takes row i % groups of them.
    """
    out = torch.empty(x.shape, dtype=torch.float32)
    means, scales = (torch.empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    wide_weight, wide_bias = (None if v is None else em.widen(v) for v in (weight, bias))
    row = torch.arange(x.shape[0]) % groups
    for tile in em.tiles(*x.shape):
        centred, mean = _centred(em.widen(x[tile]))
        squares, scale = _wide_squares(centred)
        variance = squares.mul_(1.0 / x.shape[-1]).mul_(scale).mul_(scale)
        root = em.rsqrt(variance.add_(eps))
        centred.mul_(root)
        if wide_weight is not None:
            centred.mul_(wide_weight if groups == 1 else wide_weight[row[tile]])
        if wide_bias is not None:
            centred.add_(wide_bias if groups == 1 else wide_bias[row[tile]])
        em.store_float32(centred, out[tile])
        em.store_float32(mean.squeeze(-1), means[tile])
        em.store_float32(root.squeeze(-1), scales[tile])
    return out, means, scales


def logsumexp(x: Tensor) -> Tensor:
    """[n, K] -> float32 [n]; where the maximum is infinite, it is the result."""
    out = torch.empty(x.shape[0], dtype=torch.float32)
    for tile in em.tiles(*x.shape):
        top = x[tile].amax(-1, keepdim=True).to(torch.float64)
        total: Tensor | None = None
        for part in x[tile].split(_EXP_TERMS, -1):
            mass = em.unit_total(em.unit_sum(em.exp(part.to(torch.float64).sub_(top)))).unsqueeze(-1)
            total = mass if total is None else total.add_(mass)
        assert total is not None
        value = torch.where(top.isinf(), top, em.log(total).add_(top))
        em.store_float32(value.squeeze(-1), out[tile])
    return out


def _erfc(z: Tensor) -> Tensor:
    """erfc(z) for 0 <= z <= 40, float64, relative error below 3e-9."""
    t = em.reciprocal(z + 2.0).mul_(2.0)
    x = t * 2.0 - 1.0
    later, latest = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in reversed(_ERFC[1:]):  # Clenshaw's recurrence
        later, latest = (x * later).mul_(2.0).sub_(latest).add_(coefficient), later
    series = (x * later).sub_(latest).add_(_ERFC[0])
    return em.exp(series.sub_(z * z)).mul_(t)


def gelu(x: Tensor) -> Tensor:
    """float64 x Phi(x), relative error below 1e-8. -inf gives NaN, as in torch."""
    tail = _erfc(x.abs().mul_(_SQRT_HALF).clamp_(max=40.0)).mul_(0.5)
    share = torch.where(x > 0, 1.0 - tail, tail)
    return share.masked_fill_(x < -40.0, 0.0).mul_(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """float64 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). -inf gives NaN, as in torch."""
    bounded = x.clamp(-40.0, 40.0)
    cube = (bounded * bounded).mul_(bounded).mul_(0.044715)
    u = cube.add_(bounded).mul_(_SQRT_2_OVER_PI)
    return em.sigmoid(u.mul_(2.0)).masked_fill_(x < -40.0, 0.0).mul_(x)
