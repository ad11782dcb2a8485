"""Statistics on pairs: two runs' scores on the same items. The difference is b - a throughout, in the metric's units.

0/1 scores of unrelated items take the exact McNemar test; everything else takes the sign-flip permutation test over
clusters. Intervals are `loss_bound.difference_interval`'s, which agree with a gate. Pure functions; nothing here
depends on the order of the items, and a seed fixes what is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalengine.report.stats.detectable import binary_effect, check_levels, detectable_loss, mean_effect
from evalengine.report.stats.intervals import (
    Floats,
    cluster_degrees,
    cluster_sums,
    clustered_stderr,
    task_factors,
)
from evalengine.report.stats.loss_bound import Losses, Stratum, bound_cautions, difference_interval, joined, stratum
from evalengine.report.stats.significance import mcnemar, sign_flip

Test = Literal["mcnemar-exact", "permutation"]


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
    test: Test
    p_one_sided: float  # one-sided, of b being worse than a
    minimum_detectable_effect: float  # two-sided test; > 0, inf: nothing is detectable
    minimum_detectable_loss: float  # one-sided test, given what a has to lose (`detectable_loss`); > 0, inf: none
    undetectable: str  # why no loss can be detected; "" where one can
    clusters: int  # independent groups of items; n without clusters
    effective_clusters: float  # groups of equal size that would tell as much: degrees of freedom and one; NaN for one
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
    binary = bool(np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all())
    if binary and codes.max() + 1 == len(a):
        inferred = _infer_binary(ups, downs, len(a), higher_is_better, levels)
    else:
        typical = 1.0 if binary else score_scale(a, b)
        inferred = _infer_mean(difference, codes, stderr, typical, higher_is_better, levels, seed)
    factors = np.repeat(task_factors(tasks), [size for size, _ in tasks]) if tasks else 1.0
    scale, most = score_range(a / factors, b / factors)
    strata = _strata(difference / factors, codes, tasks)
    low, high = difference_interval(strata, 0.0 if unbounded and ups + downs else scale, most, confidence)
    sizes = np.bincount(codes).astype(np.float64)
    effective = cluster_degrees(sizes) + 1
    least = detectable_loss(a, b, codes, inferred.loss_of_pairs, higher_is_better, alpha, power, metrics)
    return PairedResult(
        n=len(a), wins=wins, losses=losses, ties=len(a) - ups - downs, mean_a=_mean(a),
        mean_b=_mean(b), difference=_mean(difference), stderr=stderr, ci_low=low, ci_high=high,
        p_value=inferred.p_values[0], test=inferred.test, p_one_sided=inferred.p_values[1],
        minimum_detectable_effect=inferred.effect,
        minimum_detectable_loss=least.loss, undetectable=least.why, clusters=len(sizes),
        effective_clusters=effective, cautions=bound_cautions(strata, most),
    )  # fmt: skip


def _strata(
    difference: Floats, codes: NDArray[np.intp], tasks: Sequence[tuple[int, float]] | None
) -> Sequence[Stratum]:
    """The clusters as parts of the mean difference; of a mean over tasks by task, if each has two clusters or more."""
    if tasks is None:
        return [stratum(difference, codes)]
    ends = np.cumsum([size for size, _ in tasks])[:-1]
    columns = zip(np.split(difference, ends), np.split(codes, ends), tasks, strict=True)
    strata = joined([Losses(own, names.tolist(), weight) for own, names, (_, weight) in columns])
    if all(len(layer.parts) > 1 for layer in strata):
        return strata
    parts, shares, sizes = (
        np.concatenate([getattr(layer, name) for layer in strata]) for name in ("parts", "shares", "sizes")
    )
    return [Stratum(parts, parts - shares * math.fsum(parts), shares, sizes)]


class _Inferred(NamedTuple):
    """What a test infers from the pairs."""

    test: Test
    p_values: tuple[float, float]  # two-sided; one-sided, of b being worse
    effect: float  # minimum detectable effect of the two-sided test
    loss_of_pairs: float | None  # the one-sided test's, by the spread of the pairs alone; None for McNemar's


def _infer_binary(ups: int, downs: int, count: int, higher_is_better: bool, levels: tuple[float, float]) -> _Inferred:
    """0/1 scores of unrelated items; `levels` are (alpha, power)."""
    p_values = mcnemar(ups, downs) if higher_is_better else mcnemar(downs, ups)
    return _Inferred("mcnemar-exact", p_values, binary_effect(count, (ups + downs) / count, *levels), None)


def _infer_mean(
    difference: Floats,
    codes: NDArray[np.intp],
    stderr: float,
    scale: float,
    higher_is_better: bool,
    levels: tuple[float, float],
    seed: int,
) -> _Inferred:
    """Scores of any size, or of related items; `scale` is the size of the metric's scores."""
    groups = int(codes.max()) + 1
    degrees = cluster_degrees(np.bincount(codes).astype(np.float64))
    sums = cluster_sums(difference, codes)
    p_values = sign_flip(-sums if higher_is_better else sums, seed)
    sizes = np.abs(sums[sums != 0])
    typical = math.fsum(sizes) / len(sizes) * groups / len(difference) if len(sizes) else scale
    both, loss = (mean_effect(stderr, typical, groups, degrees, *levels, sides) for sides in (2, 1))
    return _Inferred("permutation", p_values, both, loss)


def _scores(name: str, values: ArrayLike) -> Floats:
    """`values` as float64 [n], n >= 1, all finite."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1:
        raise ValueError(f"{name} has shape {scores.shape}: one score per item is needed")
    if len(scores) == 0:
        raise ValueError(f"{name} is empty: there is no item to compare")
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] is {scores[wrong[0]]}: scores must be finite ({len(wrong)} are not)")
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
    """Whether scores lie in [0, 1], so that no more than 1 can be lost."""
    return bool(min(a.min(), b.min()) >= 0 and max(a.max(), b.max()) <= 1)


def _mean(values: Floats) -> float:
    return math.fsum(values) / len(values)
