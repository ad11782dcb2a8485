"""Rows of a right operand that one limb of 26 bits does not hold well, and the second limb that they get.

    K numbers in a row, e the exponent of its largest magnitude, e_j that of its number j.

One limb loses up to 2^-27 of the row's largest number from every other number: nothing where numbers are of one size,
all of a number that is 2^27 times smaller. Such numbers may count: multiply a channel of the activations by 2^16 and
its column of the weights by 2^-16, and no product of float32 arithmetic changes in a bit. So a row is **wide** where

    mean of 2^floor(min(e - e_j, 14) / 2)  >  8, and the limb loses a bit of some number;  or
                                           >  40, and some e - e_j is 19 or more

over its numbers that are not 0. The sum is one of integers, so the row alone decides, on every machine, and zeros that
pad it do not count. A wide row is held in 53 bits, W + W', and multiplied by three limbs of the left operand, 53 bits,
too:

    y = ((hi.W + lo.W) + lowest.W) + ((hi.W' + lo.W') + lowest.W')    each of the six sums exact and rounded once

The mean is 2.5 for normally distributed rows and 3 to 5 for long-tailed ones. In the bundled model none is above 6.7;
in SmolLM2-135M one of 10,000 rows of the weights is above 7.8, and so is one of 1,000 keys. Channels spread by random
powers of two make it 14 at 2^8, 24 at 2^10, 40 at 2^12 (577 numbers). It is a mean of roots so that a number that is
small by chance does not decide: any bound for the mean of 2^(e - e_j) itself is met by 1 % of ordinary rows of float32.
So a single channel far below the others is not seen. The largest over the root mean square says nothing: it is
at most sqrt(K), for any spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em
from evalengine.kernels.exact_product import RIGHT_BITS, product

LOWER_UNIT = 2.0 ** -(RIGHT_BITS + 1)  # W' is in units of 2^-27 of W's: it is a rest of at most half a unit of W
_FARTHEST = 14  # contract constant: from here on numbers count alike in the mean
_BOUND = 8  # contract constant, for rows of which the limb loses something
_HIGH_BOUND, _FAR = 40, 19  # contract constants, for the others: the left operand's limbs lose, too, if less


def wide_rows(x: Tensor, size: Tensor, absmax: Tensor) -> Tensor:
    """[..., K], `magnitude(x)`, which is overwritten, and `row_absmax(x)` [..., 1] -> the wide rows, int64 [W],
    ascending, as x.flatten(0, -2) counts them. Rows that are not finite are not wide."""
    maybe = _may_be_wide(size, absmax) & (absmax > 0.0) & (absmax < torch.inf)
    rows = maybe.flatten().nonzero().squeeze(-1)
    if not len(rows):
        return rows
    picked, largest = pick_rows(x, rows), pick_rows(absmax, rows)
    return rows[torch.cat([_is_wide(picked[tile], largest[tile]) for tile in em.tiles(*picked.shape)])]


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[..., K] and int64 [W], as `wide_rows` gives them -> [W, K]."""
    index: list[Tensor] = []
    for size in reversed(x.shape[:-1]):
        index.insert(0, rows % size)
        rows = rows.div(size, rounding_mode="floor")
    return x[tuple(index)]


def _may_be_wide(size: Tensor, absmax: Tensor) -> Tensor:
    """bool [..., 1]: every wide row and some others, so that most rows need not be looked at closely."""
    if size.dtype == torch.float32:
        # 2^(e - e_j) is at most 2^e / |x_j|: no rounding reaches the hundredth that is left below the bound.
        roots = size.rsqrt_().sum(-1, keepdim=True).to(torch.float64)
        return roots.square_().mul_(absmax) > 0.99 / 2 * (_BOUND * size.shape[-1]) ** 2
    # Half precision has 11 and 8 bits: the limb loses none of a number that is less far below. A zero hides the least.
    nearest = 16 if size.dtype == torch.float16 else _FAR
    least = size.view(torch.int16).amin(-1, keepdim=True).view(size.dtype).to(torch.float64)
    return least <= absmax * 2.0 ** (1 - nearest)


def _is_wide(x: Tensor, absmax: Tensor) -> Tensor:
    """[n, K] and [n, 1] -> bool [n]."""
    wide, c = em.widen(x), em.grid(absmax, RIGHT_BITS)
    lossy = ((wide + c).sub_(c) != wide).any(-1)
    there = wide != 0.0
    gap = em.exponent(absmax).sub(em.exponent(wide.abs_())).mul_(there)
    far = gap.amax(-1) >= _FAR
    total = there.to(torch.int64).bitwise_left_shift_(gap.clamp_(max=_FARTHEST).bitwise_right_shift_(1)).sum(-1)
    count = there.sum(-1)
    return (lossy & (total > count * _BOUND)) | (far & (total > count * _HIGH_BOUND))


def lower_limb(wide: Tensor, upper: Tensor, absmax: Tensor) -> Tensor:
    """float64 [n, K], its limb of 26 bits (not scaled) and [n, 1] -> the rest, on a grid 2^27 times finer."""
    c = em.grid(absmax, RIGHT_BITS) * LOWER_UNIT
    return (wide - upper).add_(c).sub_(c)


def wide_product(limbs: Tensor, absmax: Tensor, pair: Tensor, unit: Tensor) -> Tensor:
    """Limbs [..., 3, M, K] times both limbs of a wide right operand [..., 2, N, K], multiples of `unit` [..., 1, N] and
    of 2^-27 `unit` -> float64 [..., M, N]."""
    units = torch.cat((unit, unit * LOWER_UNIT), -1)
    y, rest = product(limbs, absmax, pair.flatten(-3, -2).mT, units).chunk(2, -1)
    return y.add_(rest)
