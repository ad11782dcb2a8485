"""Standard error and confidence interval of a mean paired difference: clustered, binary, and without any spread.

Quantiles come from `scipy.special` (`t.isf` is `-stdtrit`): `scipy.stats` takes a second to import, and every page of a
run has intervals.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cluster_sums(difference: Floats, codes: NDArray[np.intp]) -> Floats:
    """Sum of `difference` [n] in each cluster: [G], exactly rounded for one item and alike in every order of items."""
    order = np.lexsort((difference, np.abs(difference), codes))
    return np.bincount(codes[order], weights=difference[order]).astype(np.float64)


def clustered_stderr(difference: Floats, codes: NDArray[np.intp]) -> float:
    """Standard error of the mean of `difference` [n] (metric's units), whose clusters are `codes` [n] in 0..G-1.

    CR1: sqrt(G / (G - 1) * sum_g (sum_{i in g} (d_i - mean))^2) / n, the cluster-robust variance of a regression on
    a constant with the small-sample factor G / (G - 1) * (n - 1) / (n - k), k = 1 (Cameron & Miller 2015, "A
    Practitioner's Guide to Cluster-Robust Inference", Journal of Human Resources 50(2)). Without that factor (CR0) it
    is the clustered error of Miller 2024, "Adding Error Bars to Evals" (arXiv:2411.00640), up to n / (n - 1) in the
    diagonal terms. Clusters of one item give s / sqrt(n), the classical error. NaN for one cluster; exactly 0.0 where
    the clusters deviate from the mean by no more than rounding does.
    """
    count = len(difference)
    sizes = np.bincount(codes).astype(np.float64)
    groups = len(sizes)
    if groups == 1:
        return math.nan
    residuals = cluster_sums(difference, codes) - sizes * (math.fsum(difference) / count)
    rounding = 16 * np.finfo(np.float64).eps * float(np.max(np.abs(difference))) * float(sizes.max())
    if float(np.max(np.abs(residuals))) <= rounding:
        return 0.0
    return math.sqrt(math.fsum(residuals**2) * groups / (groups - 1)) / count


def t_interval(mean: float, stderr: float, clusters: int, confidence: float) -> tuple[float, float]:
    """mean -+ t * stderr with `clusters` - 1 degrees of freedom (as Cameron & Miller 2015 advise for few).

    One cluster says nothing about the others: (-inf, inf).
    """
    if clusters < 2:
        return -math.inf, math.inf
    half = -float(scipy.special.stdtrit(clusters - 1, (1 - confidence) / 2)) * stderr
    return mean - half, mean + half


def no_spread_interval(mean: float, scale: float, clusters: int, confidence: float) -> tuple[float, float]:
    """The interval when all clusters show the same difference, where stderr = 0 would claim certainty.

    Rule of three (Hanley & Lippman-Hand 1983, JAMA 249(13)): if none of G clusters deviates, then with the asked
    confidence at most 1 - (1 - confidence)^(1 / G), about 3 / G at 95 %, of those not seen do. Each could deviate by
    `scale` (the size of the metric's scores) and by the difference itself.
    """
    share = -math.expm1(math.log1p(-confidence) / clusters)
    half = share * (scale + abs(mean))
    return mean - half, mean + half


def bonett_price(ups: int, downs: int, count: int, confidence: float) -> tuple[float, float]:
    """Interval of a difference of two paired proportions, from the discordant pairs of `count` pairs.

    With u = (ups + 1) / (n + 2) and v = (downs + 1) / (n + 2): u - v -+ z sqrt((u + v - (u - v)^2) / (n + 2)), cut
    to [-1, 1] (Bonett & Price 2012, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions
    Based on Paired Data", Journal of Educational and Behavioral Statistics 37(4); recommended by Fagerland, Lydersen
    & Laake 2014, Statistics in Medicine 33(16)). Chosen over Tango's score interval and Agresti and Min's Wald+2
    because its exact coverage stays at or above the nominal level when few pairs differ, as between two runs of one
    model, and it has a width even when none does (about 2.8 / n at 95 %). It inverts no test: at the margin it and
    the exact McNemar p-value may disagree about zero.
    """
    up, down = (ups + 1) / (count + 2), (downs + 1) / (count + 2)
    middle = up - down
    half = -float(scipy.special.ndtri((1 - confidence) / 2)) * math.sqrt((up + down - middle**2) / (count + 2))
    return max(-1.0, middle - half), min(1.0, middle + half)
