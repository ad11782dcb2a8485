"""Matrix products of the `exact` level: integers below 2^53, so that no order of additions and no cut along K matters.

The left operand (activations, queries, attention weights) is held in two limbs of 17 and 18 bits, the right one
(weights, keys, values) in one of 26. A product of such integers is at most 2^43, so 1024 of them add up to at most
2^53, exactly; the sums of such segments are added exactly, too. The widths do not depend on K, so zeros may pad
it anywhere.

The widths are unequal because a limb's error is relative to its row's largest magnitude, a float32's to its own. Two
limbs of 21 bits against one of 21 lost more to a weight row with outliers than float32 arithmetic loses (a random Qwen2
with outlier channels: largest error of a logprob 4.9e-4 against float32's 1.1e-4; 1.8e-5 with these widths, 1.7e-5 with
every product in plain float64). Activations spread further than weights do (2.5e4 times their row's median before
SmolLM2's down_proj) and get 35 bits. Rows of a right operand that 26 bits do not hold get more (`exact_wide`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels import exact_math as em

LEFT_BITS = 17  # contract constant: bits of the left operand's upper limb (the lower limb has one more)
RIGHT_BITS = 26  # contract constant: bits of the right operand's limb
_STEP = 2.0 ** -(LEFT_BITS + 1)  # the grid of a left limb to that of the limb above
SEGMENT = 1024  # schedule: 2^(53 - 17 - 26) products, which add exactly


def left_limbs(x: Tensor, absmax: Tensor, count: int = 2) -> Tensor:
    """float64 [..., M, K] -> limbs [..., count, M, K] on the grids of `absmax` [..., M, 1], rows' largest magnitudes.

    A third limb is the rest below the second one, on a grid 2^18 times finer, as the second is to the first.
    """
    limbs = torch.empty(*x.shape[:-2], count, *x.shape[-2:], dtype=torch.float64, device=x.device)
    em.split_limbs(x, absmax, LEFT_BITS, limbs.narrow(-3, 0, 2))
    if count == 3:
        hi, lo, lowest = limbs.unbind(-3)
        c = em.grid(absmax, LEFT_BITS) * _STEP**2
        torch.sub(x, hi, out=lowest)
        lowest.sub_(lo).add_(c).sub_(c)
    return limbs


def exact_sum(absmax: Tensor, unit: Tensor | float = 1.0, count: int = 2) -> em.ExactSum:
    """An empty sum, for products of `count` limbs on the grids of `absmax` [..., M, 1] and multiples of `unit`
    ([..., 1, N] or one number)."""

    def grids() -> Tensor:
        c = em.grid(absmax, LEFT_BITS) * unit
        return torch.stack([c * _STEP**limb for limb in range(count)], -3)

    return em.ExactSum(grids)


def product_part(limbs: Tensor, right: Tensor) -> Tensor:
    """Limbs [..., L, M, K] times [..., K, N], K at most 1024, 0 or 1 batch axes -> exact float64 [..., L, M, N].

    `out=` keeps this clear of overrides of `mm` and `bmm`.
    """
    stacked = limbs.flatten(-3, -2)
    multiply = torch.bmm if stacked.ndim == 3 else torch.mm
    part = torch.empty(*limbs.shape[:-1], right.shape[-1], dtype=torch.float64, device=right.device)
    multiply(stacked, right, out=part.flatten(-3, -2))
    return part


def sum_limbs(products: Tensor) -> Tensor:
    """[..., L, M, N] -> [..., M, N]: hi's exact sum plus lo's, then plus the third limb's if there is one."""
    total, *others = products.unbind(-3)
    for lower in others:
        total.add_(lower)
    return total


def product(limbs: Tensor, absmax: Tensor, right: Tensor, unit: Tensor | float = 1.0) -> Tensor:
    """`left_limbs(x, absmax)` times right [..., K, N], multiples of `unit` ([..., 1, N] or one number) -> [..., M, N].

    Each limb's sum is exact and rounded once, to float64, and so is each sum of two limbs'.
    """
    length = right.shape[-2]
    if length <= SEGMENT:
        return sum_limbs(product_part(limbs, right))
    total = exact_sum(absmax, unit, limbs.shape[-3])
    for start in range(0, length, SEGMENT):
        cut = slice(start, start + SEGMENT)
        total.add(product_part(limbs[..., cut], right[..., cut, :]))
    return sum_limbs(total.total())
