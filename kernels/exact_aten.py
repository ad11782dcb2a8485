"""Products of the aten mode on CPUs: a term whose left factor is zero is as if it were not there.

    M rows, K terms, N columns; one batch axis or none.

For row m of a and column n of b, over the terms k with a[m, k] != 0:

    e_a, e_b   exponents of the largest |a[m, k]| and of the largest |b[k, n]|, e_b rounded up to a multiple of 4
    hi, lo     a[m, k] in two limbs: hi on the grid 2^(e_a - 14), lo on the grid 2^(e_a - 29)
    q          b[k, n] in one limb of 26 bits: on the grid 2^(e_b - 26)
    y[m, n]  = float32(float64(sum of hi q) + float64(sum of lo q)), both sums exact, whatever K is

So neither zeros that pad K (on either side, in front of anything finite), nor other rows, nor other columns change a
bit: the widths are constants, the sums are integers, and the magnitude of a term that counts for nothing is never
read. Attention over a padded batch needs that: there a probability is zero, and the value behind it is not. A row of a,
or a column of b, that holds an infinity or a NaN becomes NaN as a whole, behind a zero too (0 * NaN is NaN).

`Right` is b on the grids of its whole columns, which is all that a row without zeros needs. For the other rows
`_narrow` finds the sums whose largest numbers all follow zeros, and takes those again on their finer grids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em
from evalengine.kernels.exact_aten_rows import integer_total

LEFT_BITS = 14  # bits of the left operand's upper limb
LOWER_BITS = 15  # bits of its lower limb, a rest of at most half a unit, so its integers are no larger than the upper's
RIGHT_BITS = 26  # bits of the right operand's limb, at least 22 of them below the largest magnitude
STEP = 4  # grids of b have exponents that are multiples of this, so that a product seldom needs more than one
SEGMENT = 1 << (53 - LEFT_BITS - RIGHT_BITS)  # 8192 products of two limbs add exactly in float64
MAX_TERMS = SEGMENT << 10  # so many products add up to less than 2^63
_CLASS_BITS = 14  # 8192 equal powers of two add up to less than the next power whose exponent is a multiple of this
_LOWEST, _HIGHEST = -124, 128  # the least and the largest exponent of a grid for float32 numbers
_ROWS = 128  # rows of one matrix product, two limbs stacked
_PRODUCT_ELEMENTS = 1 << 19  # elements of one matrix product's operands or result
_TILE = 131072  # elements of b brought to their grid at a time: 1 MB of float64


@dataclass(frozen=True)
class Right:
    """A right operand on the grids of its columns."""

    source: Tensor  # [..., K, N], the operand itself
    limb: Tensor  # float64, likewise: multiples of 2^(exponent - 26)
    exponent: Tensor  # int64 [..., 1, N]: e_b over whole columns; above 128 where a column is not finite

    def columns(self, cut: slice) -> Right:
        return Right(self.source[..., cut], self.limb[..., cut], self.exponent[..., cut])


@dataclass(frozen=True)
class _Left:
    """Some rows of a left operand."""

    present: Tensor  # bool [..., M, K]: which elements are not zero
    limbs: Tensor  # float64 [..., 2, M, K]
    exponent: Tensor  # int64 [..., M, 1]: e_a

    def rows(self, index: Tensor) -> _Left:
        return _Left(*(x.index_select(-2, index) for x in (self.present, self.limbs, self.exponent)))


def _grid_exponent(magnitude: Tensor) -> Tensor:
    return em.exponent(magnitude).add_(STEP - 1).bitwise_and_(-STEP)


def _to_grid(wide: Tensor, exponent: Tensor) -> Tensor:
    """`wide`, in place, rounded to multiples of 2^(exponent - 26)."""
    c = em.pow2(exponent + (52 - RIGHT_BITS)).mul_(1.5)
    return wide.add_(c).sub_(c)


def prepare(b: Tensor) -> Right:
    """[..., K, N] of float32, bf16 or fp16. The limb takes eight bytes an element, in b's own order in memory."""
    limb = torch.empty_like(b, dtype=torch.float64)
    exponent = torch.empty((*b.shape[:-2], 1, b.shape[-1]), dtype=torch.int64, device=b.device)
    step = max(1, _TILE * b.shape[-1] // max(1, b.numel()))
    for start in range(0, b.shape[-1], step):
        cut = slice(start, start + step)
        absmax = em.row_absmax(b[..., cut], -2)
        exponent[..., cut] = _grid_exponent(absmax)
        rounded = _to_grid(em.widen(b[..., cut]), exponent[..., cut])
        torch.add(rounded, absmax.mul_(0.0), out=limb[..., cut])  # 0 times infinity or NaN is NaN
    return Right(b, limb, exponent)


def _split(a: Tensor) -> _Left:
    wide, absmax = em.widen(a), em.row_absmax(a)
    limbs = torch.empty(*a.shape[:-2], 2, *a.shape[-2:], dtype=torch.float64, device=a.device)
    c, (hi, lo) = em.grid(absmax, LEFT_BITS), limbs.unbind(-3)
    torch.add(wide, c, out=hi)
    hi.sub_(c)
    c.mul_(2.0**-LOWER_BITS)
    torch.sub(wide, hi, out=lo)
    lo.add_(c).sub_(c)
    return _Left(wide != 0, limbs, em.exponent(absmax))


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a times b, by `out=`, which the overrides of `mm` and `bmm` do not catch."""
    return (torch.bmm if a.ndim == 3 else torch.mm)(a, b, out=out)


def _sums(left: _Left, limb: Tensor, exponent: Tensor) -> Tensor:
    """Rows [..., M, K] times limb [..., K, N] on grids of these exponents -> float64 [..., M, N].

    Up to 8192 terms one float64 product is exact. More are cut, and the parts added in int64, as multiples of the two
    grids' product, so that where the cuts lie is no part of the arithmetic.
    """
    stacked = left.limbs.flatten(-3, -2)
    both = torch.empty(*left.limbs.shape[:-1], limb.shape[-1], dtype=torch.float64, device=limb.device)
    flat = both.flatten(-3, -2)
    if limb.shape[-2] <= SEGMENT:
        _multiply(stacked, limb, flat)
    else:
        hi_bits = left.exponent.unsqueeze(-3) - LEFT_BITS
        row = torch.cat((hi_bits, hi_bits - LOWER_BITS), -3).clamp_(max=_HIGHEST)
        column = (exponent.unsqueeze(-3) - RIGHT_BITS).clamp_(max=_HIGHEST)
        total = torch.zeros(both.shape, dtype=torch.int64, device=both.device)
        for start in range(0, limb.shape[-2], SEGMENT):
            cut = slice(start, start + SEGMENT)
            _multiply(stacked[..., cut], limb[..., cut, :], flat)
            total.add_(both.mul_(em.pow2(-row)).mul_(em.pow2(-column)).to(torch.int64))
        not_finite = both.mul_(0.0)  # NaN where the row or the column is
        both = integer_total(total).mul_(em.pow2(row)).mul_(em.pow2(column)).add_(not_finite)
    hi, lo = both.unbind(-3)
    return hi.add_(lo)


def _narrow(y: Tensor, left: _Left, right: Right) -> None:
    """Takes the sums of y [..., M, N] again, in place, whose terms are all below their column's top grid."""
    some = left.present.any(-1) & ~left.present.all(-1)  # [..., M]
    if not some.any():
        return
    over_batch = tuple(range(y.ndim - 2))
    rows = (some.any(0) if over_batch else some).nonzero().squeeze(-1)
    left, some = left.rows(rows), some.index_select(-1, rows)
    top = right.exponent
    least = em.pow2((top - STEP).clamp(_LOWEST, _HIGHEST)).to(torch.float32)
    # There is no grid below the last one, and none for a column that holds an infinity or a NaN.
    least.masked_fill_((top <= _LOWEST) | (top > _HIGHEST), 0.0)
    near = (right.source.abs() >= least).to(torch.float32)
    counts = torch.empty(*left.present.shape[:-1], near.shape[-1])
    _multiply(left.present.to(torch.float32), near, counts)
    wrong = (counts == 0) & some.unsqueeze(-1) & (top <= _HIGHEST)
    columns = wrong.any(-2).any(0) if over_batch else wrong.any(-2)
    if not columns.any():
        return
    columns = columns.nonzero().squeeze(-1)
    _again(y, left, rows, right, columns, wrong.index_select(-1, columns))


def _again(y: Tensor, left: _Left, rows: Tensor, right: Right, columns: Tensor, wrong: Tensor) -> None:
    """Takes the sums marked in `wrong` [..., rows, columns] on the grids of their own largest terms."""
    wide = em.widen(right.source.index_select(-1, columns))
    top = right.exponent.index_select(-1, columns)
    magnitude = wide.abs()
    # `below` counts how many grids below its column's top one each element is. Its least value over a sum's terms gives
    # the largest of their weights, which is the leading power of two of the weights' sum in any order of adding.
    below = (top - _grid_exponent(magnitude)).bitwise_right_shift_(2).clamp_(min=0)
    weight = em.pow2(below.mul_(-_CLASS_BITS))
    present = left.present.to(torch.float64)
    leading = torch.zeros(wrong.shape, dtype=torch.float64)
    part = torch.empty_like(leading)
    for start in range(0, weight.shape[-2], SEGMENT):
        cut = slice(start, start + SEGMENT)
        torch.maximum(leading, _multiply(present[..., cut], weight[..., cut, :], part), out=leading)
    log2 = leading.view(torch.int64).bitwise_right_shift(52).sub_(1023)
    level = log2.div(_CLASS_BITS, rounding_mode="floor").neg_().masked_fill_(~wrong, 0)
    picked = y.index_select(-2, rows)
    mended = picked.index_select(-1, columns)
    for down in level.unique().tolist():
        if down:
            exponent = (top - STEP * down).clamp_(_LOWEST, _HIGHEST)
            inside = torch.where(magnitude < em.pow2(exponent), wide, 0.0)  # A larger element follows zeros.
            mended = torch.where(level == down, _sums(left, _to_grid(inside, exponent), exponent), mended)
    picked.index_copy_(-1, columns, mended)
    y.index_copy_(-2, rows, picked)


def _block(a: Tensor, right: Right, out: Tensor) -> None:
    left = _split(a)
    zeros = not bool(left.present.all())
    step = max(1024, _PRODUCT_ELEMENTS // (2 * a.shape[-2]))
    for start in range(0, out.shape[-1], step):
        part = right.columns(slice(start, start + step))
        y = _sums(left, part.limb, part.exponent)
        if zeros:
            _narrow(y, left, part)
        em.store_float32(y, out[..., start : start + step])


def product(a: Tensor, right: Right) -> Tensor:
    """[M, K] by [K, N] -> float32 [M, N]. K from 1 to 2^23."""
    k, n = right.source.shape
    assert 0 < k <= MAX_TERMS, f"a sum of {k} products"
    out = torch.empty(a.shape[0], n, dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[0], _ROWS):
        cut = slice(start, start + _ROWS)
        _block(a[cut], right, out[cut])
    return out


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] by [B, K, N] -> float32 [B, M, N]: `product`, entry by entry. K from 1 to 2^23."""
    batch, m, k = a.shape
    n = b.shape[-1]
    assert 0 < k <= MAX_TERMS, f"a sum of {k} products"
    rows = max(1, min(m, _PRODUCT_ELEMENTS // (2 * max(n, k))))
    step = max(1, _PRODUCT_ELEMENTS // max(1, 2 * rows * max(n, k), k * n))
    out = torch.empty(batch, m, n, dtype=torch.float32, device=a.device)
    for first in range(0, batch, step):
        entries = slice(first, first + step)
        right = prepare(b[entries])
        for start in range(0, m, rows):
            cut = slice(start, start + rows)
            _block(a[entries, cut], right, out[entries, cut])
    return out
