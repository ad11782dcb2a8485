"""The paired permutation test: signs of the clusters' differences, flipped."""

from __future__ import annotations

import math

import numpy as np
import scipy

from evalengine.report.stats.intervals import Floats

RESAMPLES = 9999  # most flips that are drawn or counted: p has a resolution of 1e-4
EXACT = 12  # differing clusters whose flips are all counted: with the 0 that is added, 2^13 <= RESAMPLES
FLIPS = 20_000_000  # most signs that a test draws: 100,000 items take seconds, with fewer resamples (at least 999)
BATCH = 1_000_000  # scores held at once


def sign_flip(sums: Floats, seed: int = 0) -> tuple[float, float]:
    """(two-sided p, p of a sum this large): the paired permutation test of `sums` [G], the clusters' differences.

    Under the null hypothesis the runs' labels are exchangeable within a cluster, so each sum's sign is a fair coin
    (Fisher 1935; Good 2005, "Permutation, Parametric and Bootstrap Tests of Hypotheses"). Clusters that sum to 0 say
    nothing and are left out. All flips are counted where they are at most `RESAMPLES`, else that many are drawn and
    p = (1 + extreme) / (1 + drawn), never 0 (Phipson & Smyth 2010, SAGMB 9(1)).
    """
    sums = sums[sums != 0]
    if len(sums) == 0:
        return 1.0, 1.0
    sums = np.append(sums / np.max(np.abs(sums)), 0.0)  # a 0 changes no p-value, and SciPy wants two numbers
    negative = math.fsum(sums) < 0
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
    larger = float(result.pvalue)
    smaller = float((np.count_nonzero(null <= result.statistic) + added) / (len(null) + added))
    return min(1.0, 2 * min(larger, smaller)), smaller if negative else larger


def resamples(sums: int) -> int:
    """How many flips of so many sums are drawn where they are too many to count them all."""
    return max(999, min(RESAMPLES, FLIPS // sums))
