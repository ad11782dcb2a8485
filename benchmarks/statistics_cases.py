"""Cases with a known truth for the statistics of gate and compare, and how often a bound is wrong in them.

Shares that can be counted are counted (`passing`: a sum over all outcomes); the others are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from evalengine.report.stats.intervals import cluster_degrees, clustered_stderr, t_interval
from evalengine.report.stats.loss_bound import LossBound, bound_cautions, difference_interval, loss_bound, stratum
from evalengine.report.stats.paired import Tested, tested

Floats = NDArray[np.float64]
Bound = Callable[[int, int, int], float]  # (losses, wins, documents) -> the bound
ALPHA = 0.05
TAIL = 1e-7  # probability of the numbers of wins that `passing` leaves out


def passing(bound: Bound, count: int, margin: float, loss: float, win: float) -> float:
    """Probability that `bound` lies within `margin`, if each of `count` documents is lost with probability `loss` and
    won with `win`. All outcomes are counted. `bound` must grow with losses."""
    total = 0.0
    for wins in range(int(stats.binom.isf(TAIL, count, win)) + 1):
        low, high = -1, count - wins  # Bisection finds the most losses that pass.
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if bound(middle, wins, count) <= margin else (low, middle - 1)
        if low >= 0:
            total += float(stats.binom.pmf(wins, count, win) * stats.binom.cdf(low, count - wins, loss / (1 - win)))
    return total


def gate_bound(losses: int, wins: int, count: int) -> float:
    """The gate's bound for 0/1 scores of unrelated documents: `loss_bound` by the counts alone."""
    mean, variance = (losses - wins) / count, (losses + wins) / count - ((losses - wins) / count) ** 2
    return LossBound(mean, (variance / (count - 1)) ** 0.5, 1 / count, 1 / count, count - 1.0, ALPHA, count, 1.0,
                     0.0 if losses else 1 / count).bound  # fmt: skip


def bonett_price(ups: int, downs: int, count: int, confidence: float) -> tuple[float, float]:
    """Interval of a difference of two paired proportions, from the discordant pairs of `count` pairs.

    With u = (ups + 1) / (n + 2) and v = (downs + 1) / (n + 2): u - v -+ z sqrt((u + v - (u - v)^2) / (n + 2)), cut
    to [-1, 1] (Bonett & Price 2012, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions
    Based on Paired Data", Journal of Educational and Behavioral Statistics 37(4)).
    """
    up, down = (ups + 1) / (count + 2), (downs + 1) / (count + 2)
    middle, z = up - down, -float(special.ndtri((1 - confidence) / 2))
    half = z * ((up + down - middle**2) / (count + 2)) ** 0.5
    return max(-1.0, middle - half), min(1.0, middle + half)


def bonett_price_bound(losses: int, wins: int, count: int) -> float:
    """The end of Bonett and Price's two-sided interval, at twice alpha."""
    return -bonett_price(wins, losses, count, 1 - 2 * ALPHA)[0]


def bounds_of(losses: Floats, codes: NDArray[np.intp]) -> tuple[float, float, float]:
    """(the gate's bound with clusters, without them, and a plain t bound with clusters)."""
    alone = np.arange(len(losses))
    ours, unrelated = (loss_bound([stratum(losses, clusters)], 1.0, ALPHA).bound for clusters in (codes, alone))
    groups = int(codes.max()) + 1
    plain = float(losses.mean() + _t_quantile(groups - 1) * clustered_stderr(losses, codes))
    return ours, unrelated, plain


def p_of(losses: Floats, codes: NDArray[np.intp] | None = None) -> Tested:
    """The p-values of shares' losses that are not right or wrong; without `codes` documents are unrelated."""
    return tested([stratum(losses, np.arange(len(losses)) if codes is None else codes)], 1.0, 1.0, answers=False)


def false_alarms(losses: Floats, codes: NDArray[np.intp]) -> tuple[bool, bool, bool, bool]:
    """Whether shares' losses are significant: two-sided without a caution, two-sided, and both again one-sided."""
    strata = [stratum(losses, codes)]
    bound = loss_bound(strata, 1.0, ALPHA, 1.0)
    if not (bound.inner(1.0) > 0 or bound.below > 0):  # most draws: no p is small, and no flips need be drawn
        return False, False, False, False
    found, warned = p_of(losses, codes), [bool(bound_cautions(strata, 1.0, ALPHA, either)) for either in (True, False)]
    both, one = found.p_value <= ALPHA, found.p_one_sided <= ALPHA
    return both and not warned[0], both, one and not warned[1], one


def rare_losses(rng: np.random.Generator, shape: int | tuple[int, int], share: float = 0.03) -> Floats:
    """Differences of mean 0: a rare document has -0.5, and the others have what makes up for it."""
    return np.where(rng.random(shape) < share, -0.5, 0.5 * share / (1 - share))


def covers(differences: Floats, codes: NDArray[np.intp], truth: float, scale: float = 1.0) -> tuple[bool, bool]:
    """Whether 95 % intervals of the mean difference contain the truth: `compare`'s, and Student's t over clusters.
    scale: 1 for shares, 0 for log-likelihoods."""
    low, high = difference_interval([stratum(differences, codes)], scale, scale or math.inf)
    degrees = cluster_degrees(np.bincount(codes).astype(np.float64))
    plain = t_interval(float(differences.mean()), clustered_stderr(differences, codes), degrees, 0.95)
    return low <= truth <= high, plain[0] <= truth <= plain[1]


def unequal_groups(rng: np.random.Generator, groups: int, largest: int) -> NDArray[np.intp]:
    """The cluster of each document: clusters of 1 to `largest`."""
    return np.repeat(np.arange(groups), rng.integers(1, largest + 1, groups))


def related_flips(rng: np.random.Generator, codes: NDArray[np.intp], hit: float, share: float, lost: float) -> Floats:
    """Losses (1), wins (-1) and ties: a cluster is touched with probability `hit`, then each of its documents flips
    with `share`, all the same way: a loss with probability `lost`. The true loss is hit * share * (2 lost - 1)."""
    groups = int(codes.max()) + 1
    touched = (rng.random(groups) < hit) * np.where(rng.random(groups) < lost, 1.0, -1.0)
    return np.asarray(touched[codes] * (rng.random(len(codes)) < share), dtype=np.float64)


def flips(rng: np.random.Generator, count: int, loss: float, win: float) -> Floats:
    """Losses (1), wins (-1) and ties (0) of unrelated documents."""
    return rng.choice([1.0, -1.0, 0.0], size=count, p=[loss, win, 1 - loss - win])


_QUANTILES: dict[int, float] = {}


def _t_quantile(freedom: int) -> float:
    if freedom not in _QUANTILES:
        _QUANTILES[freedom] = float(stats.t.isf(ALPHA, freedom))
    return _QUANTILES[freedom]
