"""Statistics on pairs: two runs' scores on the same items. The difference is b - a throughout, in the metric's units.

0/1 scores of unrelated items take the exact McNemar test; everything else takes the sign-flip permutation test over
clusters, whose p is no less than that of the interval (`tested`). Intervals are `loss_bound.difference_interval`'s,
which agree with a gate. Pure functions; nothing here depends on the order of the items, and a seed fixes what is
random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalengine.report.numbers import LARGEST, mean
from evalengine.report.stats.detectable import binary_effect, check_levels, detectable_loss, mean_effect
from evalengine.report.stats.intervals import (
    Floats,
    cluster_degrees,
    clustered_stderr,
    task_factors,
)
from evalengine.report.stats.loss_bound import (
    Losses,
    Stratum,
    bound_cautions,
    difference_interval,
    joined,
    loss_bound,
    opposite,
)
from evalengine.report.stats.significance import mcnemar, sign_flip, tail_p

# The source of a p-value. "bound": where the interval begins to exclude 0, or `tail_p`
Test = Literal["mcnemar-exact", "permutation", "bound"]


@dataclass(frozen=True)
class PairedResult:
    """Run b against run a on the same n items. Shares and p-values are in [0, 1]; the rest has the metric's units."""

    n: int
    wins: int  # items on which b is better, by higher_is_better
    losses: int  # items on which b is worse
    ties: int  # items with equal scores
    mean_a: float
    mean_b: float
    difference: float  # mean_b - mean_a, whichever of them is better
    stderr: float  # the difference's, clustered; NaN for one cluster
    ci_low: float  # confidence interval of the difference; infinite for one cluster
    ci_high: float
    p_value: float  # two-sided
    test: Test  # of `p_value`
    p_one_sided: float  # one-sided, of b being worse than a
    test_one_sided: Test
    minimum_detectable_effect: float  # two-sided test; > 0, inf: nothing is detectable
    minimum_detectable_loss: float  # one-sided test, given what a has to lose (`detectable_loss`); > 0, inf: none
    undetectable: str  # why no loss can be detected; "" where one can
    clusters: int  # independent groups of items; n without clusters
    effective_clusters: float  # groups of equal size with as much information: degrees of freedom and one; NaN for one
    unit: float  # the part of the difference that one more cluster could make (`LossBound.seen`); NaN for one cluster
    scale: float  # the size of one score in `unit`; 0 where it is not known
    cautions: tuple[str, ...] = ()  # why the interval may be too narrow


def paired(
    a: ArrayLike,
    b: ArrayLike,
    clusters: ArrayLike | None = None,
    confidence: float = 0.95,
    higher_is_better: bool = True,
    alpha: float = 0.05,
    power: float = 0.8,
    seed: int = 0,
    metrics: int = 1,
    unbounded: bool = False,
    tasks: Sequence[tuple[int, float]] | None = None,
) -> PairedResult:
    """Compares scores `a` [n] and `b` [n] of the same items; `clusters` [n] names each item's group (its document).

    `alpha` and `power` are those of the minimum detectable effects, `metrics` how many metrics share `alpha` (Holm's
    first and hardest step), `seed` that of the permutation test. `unbounded`: the scores are log-likelihoods: no size
    is known of a change that was not seen, so the interval allows for changes like those seen. `tasks`: the number of
    items and the weight of each task, one after the other, whose scores `metric_interval.scaled` made; the interval is
    then that of a mean over these tasks, which are fixed.

    Raises `ValueError` for no items, unequal lengths, scores that are not finite (with their index), and levels outside
    (0, 1) or a power that is not above alpha.
    """
    levels = (alpha / max(metrics, 1), power)
    check_levels(confidence, *levels)
    a, b = _scores("a", a), _scores("b", b)
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} scores and b has {len(b)}: pairs need the same items")
    codes = cluster_codes(clusters, len(a))
    difference = b - a
    ups, downs = int(np.count_nonzero(difference > 0)), int(np.count_nonzero(difference < 0))
    wins, losses = (ups, downs) if higher_is_better else (downs, ups)
    stderr = clustered_stderr(difference, codes)
    tasks = tasks or [(len(a), 1.0)]
    factors, ends = np.repeat(task_factors(tasks), [n for n, _ in tasks]), np.cumsum([n for n, _ in tasks])[:-1]
    ranges = [score_range(x, y) for x, y in zip(*(np.split(c / factors, ends) for c in (a, b)), strict=True)]
    scale, most = (max(column) for column in zip(*ranges, strict=True))
    scale = 0.0 if unbounded and ups + downs else scale

    def strata_of(values: Floats) -> Sequence[Stratum]:
        columns = zip(np.split(values / factors, ends), np.split(codes, ends), tasks, strict=True)
        return joined([Losses(own, names.tolist(), weight) for own, names, (_, weight) in columns])

    strata = strata_of(difference)
    worse = opposite(strata) if higher_is_better else strata
    bound = loss_bound(worse, scale, 0.5, most)
    answers = bool(np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all())
    found = tested(worse, scale, most, answers, seed)
    of_pairs: float | None
    if found.test == "mcnemar-exact":
        effect, of_pairs = binary_effect(len(a), (ups + downs) / len(a), *levels), None
    else:
        parts, typical = np.concatenate([layer.parts for layer in worse]), 1.0 if answers else score_scale(a, b)
        effect, of_pairs = (mean_effect(parts, bound, scale, typical, *levels, sides) for sides in (2, 1))
    low, high = difference_interval(strata, scale, most, confidence)
    sizes = np.bincount(codes).astype(np.float64)
    effective = cluster_degrees(sizes) + 1
    least = detectable_loss(
        a, b, codes, of_pairs, lambda room: loss_bound(strata_of(room), scale, 0.5, most).p_above(0.0),
        higher_is_better, alpha, power, metrics,
    )  # fmt: skip
    return PairedResult(
        n=len(a), wins=wins, losses=losses, ties=len(a) - ups - downs, mean_a=mean(a),
        mean_b=mean(b), difference=mean(difference), stderr=stderr, ci_low=low, ci_high=high,
        **found._asdict(), minimum_detectable_effect=effect,
        minimum_detectable_loss=least.loss, undetectable=least.why, clusters=len(sizes), effective_clusters=effective,
        unit=bound.seen, scale=scale, cautions=bound_cautions(strata, scale),
    )  # fmt: skip


class Tested(NamedTuple):
    """The p-values of pairs, and where they are from."""

    p_value: float  # two-sided
    test: Test
    p_one_sided: float  # of a loss
    test_one_sided: Test


def tested(strata: Sequence[Stratum], scale: float, most: float, answers: bool, seed: int = 0) -> Tested:
    """The test of compare, of several models, and of a gate without a margin: whether the mean loss of `strata` is 0.

    scale, most: as in `loss_bound`. answers: whether all scores are 0 or 1, whose unrelated documents of equal weight
    take McNemar's exact test: two directions of one change, with equal means, are equally likely.

    All else takes the larger of two p-values. The sign-flip test alone tests whether differences are symmetric about 0,
    not whether their mean is 0: if 3 % of 100 documents lose half a score, and the others gain what makes up for it, it
    rejects in .2 of comparisons. The other p is where the interval begins to exclude 0: `LossBound.p_outside` for two
    sides, so that 0 lies outside the 95 % interval if p is at most 0.05 (and only then, unless the sign flips have the
    larger p), and `LossBound.p_above` for one side, by which a gate with a margin fails. If no such loss is drawn, all
    documents gain: the caution of `bound_cautions` says what could not have been seen. False alarms were .22 among 30
    documents of which 5 % lose half a score, all with the caution, .05 among 100 of which 3 % do, and .00 to .06 where
    scores jitter, samples are drawn again, or clusters change (`benchmarks statistics`).
    """
    parts = np.concatenate([layer.parts for layer in strata])
    shares, sizes = (np.concatenate([getattr(layer, name) for layer in strata]) for name in ("shares", "sizes"))
    if answers and sizes.max() == 1 and np.ptp(shares) <= 1e-9 * shares[0]:
        both, worse = mcnemar(int(np.count_nonzero(parts < 0)), int(np.count_nonzero(parts > 0)))
        return Tested(both, "mcnemar-exact", worse, "mcnemar-exact")
    bound = loss_bound(strata, scale, 0.5, most)
    bounds = bound.p_outside(scale), bound.p_above(0.0)
    if min(bounds) == 1:
        return Tested(1.0, "bound", 1.0, "bound")
    flips, drawn = sign_flip(parts, seed), tail_p(parts[parts != 0]) is None
    names: list[Test] = ["permutation" if drawn and flips[n] >= bounds[n] else "bound" for n in (0, 1)]
    return Tested(max(flips[0], bounds[0]), names[0], max(flips[1], bounds[1]), names[1])


def _scores(name: str, values: ArrayLike) -> Floats:
    """`values` as float64 [n], n >= 1, all `in_range`."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1:
        raise ValueError(f"{name} has shape {scores.shape}: one score per item is needed")
    if len(scores) == 0:
        raise ValueError(f"{name} is empty: there is no item to compare")
    wrong = np.flatnonzero(~(np.abs(scores) < LARGEST))
    if len(wrong):
        value = f"{name}[{wrong[0]}] is {scores[wrong[0]]}"
        raise ValueError(f"{value}: scores must be finite, and below {LARGEST:g} ({len(wrong)} are not)")
    return scores


def cluster_codes(clusters: ArrayLike | None, count: int) -> NDArray[np.intp]:
    """Each item's cluster as a number in 0..G-1; without clusters every item is its own. Raises `ValueError`."""
    if clusters is None:
        return np.arange(count)
    names = np.asarray(clusters)
    if names.shape != (count,):
        raise ValueError(f"clusters has shape {names.shape}: one name for each of the {count} items is needed")
    return np.unique(names, return_inverse=True)[1]


def score_scale(a: Floats, b: Floats) -> float:
    """How far apart scores can be, for all that was seen: their range, or their size where all are equal."""
    both = np.concatenate((a, b))
    return float(np.ptp(both)) or float(np.max(np.abs(both)))


def score_range(a: Floats, b: Floats) -> tuple[float, float]:
    """(the size of one score, the most that can be lost): 1 and 1 for shares; else `score_scale` and no limit."""
    return (1.0, 1.0) if are_shares(a, b) else (score_scale(a, b), math.inf)


def are_shares(a: Floats, b: Floats) -> bool:
    """Whether scores are in [0, 1], so that no more than 1 can be lost."""
    return bool(min(a.min(), b.min()) >= 0 and max(a.max(), b.max()) <= 1)
