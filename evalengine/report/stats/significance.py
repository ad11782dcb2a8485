"""Tests on pairs: exact McNemar, the sign-flip permutation test, and Holm's correction over a family of tests."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import scipy

from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.intervals import Floats

ALPHA = 0.05  # of compare's and the models' tests, after Holm's correction
RESAMPLES = 9999  # most flips that are drawn or counted: a drawn p has a resolution of 1e-4
EXACT = 12  # differing clusters whose flips are all counted: with the 0 that is added, 2^13 <= RESAMPLES
FLIPS = 20_000_000  # most signs that a test draws: 100,000 items take seconds, with fewer resamples (at least 999)
TAIL_FACTOR = 1 / (2 * math.erfc(1))  # 3.178, the least that holds for all numbers
BATCH = 1_000_000  # scores held at once
Name = TypeVar("Name")


def sign_flip(sums: Floats, seed: int = 0) -> tuple[float, float]:
    """(two-sided p, p of a sum this large): the paired permutation test of `sums` [G], the clusters' differences.

    Under the null hypothesis the runs' labels are exchangeable within a cluster, so each sum's sign is a fair coin
    (Fisher 1935; Good 2005, "Permutation, Parametric and Bootstrap Tests of Hypotheses"). That is more than a mean of
    0: `paired.tested` has the test of the mean. Clusters that sum to 0 say nothing and are left out.

    All flips are counted where they are at most `RESAMPLES`. Else `tail_p` decides from the sums, before any flip is
    drawn, whether its bound is the p, or p = (2 + extreme) / (1 + drawn): one more than Phipson & Smyth 2010 (SAGMB
    9(1)), which pays for the cases that the bound takes.
    """
    sums = sums[sums != 0]
    if len(sums) == 0:
        return 1.0, 1.0
    negative = math.fsum(sums) < 0
    if (bound := tail_p(sums)) is not None:
        return min(1.0, 2 * bound), 1.0 if negative else bound
    sums = np.append(sums / np.max(np.abs(sums)), 0.0)  # a 0 changes no p-value, and SciPy wants two numbers
    sums = -sums if negative else sums  # so (a, b) and (b, a) draw the same flips
    sums = sums[np.lexsort((sums, np.abs(sums)))] / math.fsum(np.abs(sums))
    result = scipy.stats.permutation_test(
        (sums,),
        lambda x, axis: np.round(np.sum(x, axis=axis), 12),  # equal sums stay equal whatever order they round in
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples(len(sums)),
        batch=max(1, BATCH // len(sums)),
        alternative="greater",
        random_state=np.random.default_rng(seed),
    )
    null = result.null_distribution
    added = 0 if len(sums) <= EXACT + 1 else 1  # as in SciPy: none when all are counted
    larger = float(result.pvalue) + added / (len(null) + 1)
    smaller = float((np.count_nonzero(null <= result.statistic) + added) / (len(null) + added))
    return min(1.0, 2 * min(larger, smaller)), smaller if negative else larger


def tail_p(sums: Floats) -> float | None:
    """`tail_bound` of the size of the sum of `sums` [G], without zeros, where it is below the least p that can be
    drawn: Holm's correction over hundreds of tests needs such p-values. None where flips are counted or drawn."""
    if len(sums) <= EXACT:
        return None
    sums = sums / np.max(np.abs(sums))
    bound = tail_bound(abs(math.fsum(sums)) / math.sqrt(math.fsum(sums**2)))
    return bound if bound < 1 / (1 + resamples(len(sums))) else None


def tail_bound(z: float) -> float:
    """Upper bound of the probability that a sum of fairly signed numbers is at least z times the root of the sum of
    their squares: `TAIL_FACTOR` times the normal tail (Bentkus & Dzindzalieta 2015, Bernoulli 21(2)). > 0."""
    return max(TAIL_FACTOR * float(scipy.special.ndtr(-z)), sys.float_info.min)


def least_p(count: int) -> float:
    """The one-sided p of `sign_flip` for `count` equal sums, the least that so many can have; its expectation where
    flips are drawn."""
    if count <= EXACT:
        return 0.5**count
    bound = tail_p(np.ones(count))
    return (2 + resamples(count) * 0.5**count) / (1 + resamples(count)) if bound is None else bound


def resamples(sums: int) -> int:
    """How many flips of so many sums are drawn where they are too many to count them all."""
    return max(999, min(RESAMPLES, FLIPS // sums))


def mcnemar(wins: int, losses: int) -> tuple[float, float]:
    """(two-sided p, p of more losses than chance gives): the exact test on discordant pairs (McNemar 1947).

    Under the null hypothesis losses ~ Binomial(wins + losses, 1/2). (1, 1) where no pair differs.
    """
    if wins + losses == 0:
        return 1.0, 1.0
    both = scipy.stats.binomtest(losses, wins + losses).pvalue
    return float(both), float(scipy.stats.binomtest(losses, wins + losses, alternative="greater").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for the family, in the given order: Holm 1979, Scandinavian Journal of Statistics 6(2).

    The i-th smallest of m (from 0) becomes the running maximum of (m - i) p, at most 1. Controls the probability of
    any false alarm, however the metrics depend on each other.
    """
    adjusted, running = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def one_test(keys: Iterable[ScoreKey], runs: Sequence[Run]) -> dict[ScoreKey, ScoreKey]:
    """Each metric's representative: the first of its task and filter that gives every document of every run the same
    value, as `exact_match` and `avg@8` of a task that samples its answers. Metrics without a value per document
    represent themselves."""
    first: dict[tuple[object, ...], ScoreKey] = {}
    found = {}
    for key in keys:
        columns = tuple(tuple(sorted(run.scores.get(key, {}).items())) for run in runs)
        found[key] = first.setdefault((key[0], key[2], columns), key) if all(columns) else key
    return found


def family_p(p_values: Mapping[Name, float], same: Mapping[Any, Any]) -> dict[Name, float]:
    """The p-values after Holm's correction, in which metrics of one representative (`one_test`) are one test."""
    tests = [name for name in p_values if same.get(name, name) == name or same[name] not in p_values]
    adjusted = dict(zip(tests, holm([p_values[name] for name in tests]), strict=True))
    return {name: adjusted[name] if name in adjusted else adjusted[same[name]] for name in p_values}
