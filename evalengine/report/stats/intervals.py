"""Standard error, degrees of freedom and t interval of a mean over clusters.

Quantiles come from `scipy.special` (`t.isf` is `-stdtrit`): `scipy.stats` takes a second to import, and every page of a
run has intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FEW = 20  # as many equal clusters: with fewer, intervals of 0/1 scores covered .91 to .93 in place of .95
TAILS = 8  # as many documents that make a spread: with fewer, or 20 in all, heavy tails left intervals at .80 to .88


def cluster_sums(difference: Floats, codes: NDArray[np.intp]) -> Floats:
    """Sum of `difference` [n] in each cluster: [G], exactly rounded for one item and alike in every order of items."""
    order = np.lexsort((difference, np.abs(difference), codes))
    return np.bincount(codes[order], weights=difference[order]).astype(np.float64)


def clustered_stderr(difference: Floats, codes: NDArray[np.intp]) -> float:
    """Standard error of the mean of `difference` [n] (metric's units), whose clusters are `codes` [n] in 0..G-1.

    CR2 of a regression on a constant: sqrt(sum_g r_g^2 / (1 - n_g / n)) / n with r_g = sum_{i in g} (d_i - mean), which
    is unbiased where documents are unrelated, however uneven the clusters (Bell & McCaffrey 2002, "Bias Reduction in
    Standard Errors for Linear Regression with Multi-Stage Samples", Survey Methodology 28(2)). Without these factors
    (CR0) it is the clustered error of Miller 2024, "Adding Error Bars to Evals" (arXiv:2411.00640), up to n / (n - 1)
    in the diagonal terms. Clusters of one item give s / sqrt(n), the classical error. NaN for one cluster; exactly 0.0
    where the clusters deviate from the mean by no more than rounding does.
    """
    count = len(difference)
    sizes = np.bincount(codes).astype(np.float64)
    if len(sizes) == 1:
        return math.nan
    residuals = cluster_sums(difference, codes) - sizes * (math.fsum(difference) / count)
    rounding = 16 * np.finfo(np.float64).eps * float(np.max(np.abs(difference))) * float(sizes.max())
    if float(np.max(np.abs(residuals))) <= rounding:
        return 0.0
    return math.sqrt(residual_variance(residuals, sizes)) / count


def residual_variance(residuals: Floats, sizes: Floats) -> float:
    """CR2's variance of a sum over clusters: `residuals` [G] of clusters with `sizes` [G], which may be any weights."""
    return math.fsum(residuals**2 / (1 - sizes / math.fsum(sizes)))


def cluster_degrees(sizes: Floats) -> float:
    """Degrees of freedom of `clustered_stderr` for clusters of `sizes` [G] (or weights): G - 1 where all are equal.

    Bell and McCaffrey's, (tr B)^2 / tr B^2 with B the covariance of CR2's terms, for documents that are wholly alike
    within their cluster (Imbens & Kolesar 2016, "Robust Standard Errors in Small Samples", Review of Economics and
    Statistics 98(4), take such a correlation in place of none). So a few large clusters count as the few that they
    are: of 100 clusters with 10 that are 20 times as large as the others 6 degrees are left; with G - 1 the 95 %
    interval covers .86 there (`benchmarks statistics`). NaN for one cluster.

    With shares s = n / sum n, d = 1 - s and q = sum s^2: B_gh = s_g s_h (q - s_g - s_h) / sqrt(d_g d_h) for g != h, and
    B_gg = s_g^2 (1 + q - 2 s_g) / d_g. The sums over pairs are products of moments.
    """
    if len(sizes) < 2:
        return math.nan
    if float(np.ptp(sizes)) == 0:
        return len(sizes) - 1.0
    share = sizes / math.fsum(sizes)
    total = math.fsum(share**2)
    a = share**2 / (1 - share)  # the weight of a cluster in B's entries
    diagonal = a * (1 + total - 2 * share)
    a0, a1, a2 = (math.fsum(a * share**power) for power in (0, 1, 2))
    pairs = a0 * a0 * total**2 - 4 * total * a0 * a1 + 2 * a0 * a2 + 2 * a1 * a1
    own = math.fsum((a * (total - 2 * share)) ** 2)
    return math.fsum(diagonal) ** 2 / (math.fsum(diagonal**2) + max(0.0, pairs - own))


def task_factors(tasks: Sequence[tuple[int, float]]) -> list[float]:
    """The factor of each task's scores, by (number of items, weight), that makes the plain mean of all items the mean
    of the tasks by their weights: exactly 1.0 where it is 1."""
    total = sum(size for size, _ in tasks)
    factors = [weight * total / size for size, weight in tasks]
    return [1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor for factor in factors]


def t_interval(mean: float, stderr: float, degrees: float, confidence: float) -> tuple[float, float]:
    """mean -+ t * stderr with so many degrees of freedom (`cluster_degrees`).

    One cluster, whose degrees are NaN or 0, says nothing about the others: (-inf, inf).
    """
    if not degrees > 0:
        return -math.inf, math.inf
    half = -float(scipy.special.stdtrit(degrees, (1 - confidence) / 2)) * stderr
    return mean - half, mean + half


def heavy_tails(residuals: Floats) -> str:
    """A caution where so few residuals [G] of a mean without limits make its spread that tails stay unseen; "" where
    more do. (sum e^2)^2 / sum e^4 is the number of equal ones that would: a third of them all if they are normal."""
    squares = residuals**2
    makers = float(squares.sum()) ** 2 / float((squares**2).sum()) if squares.any() else 0.0
    if len(residuals) > FEW and makers >= TAILS:
        return ""
    if len(residuals) <= FEW:
        return f"{len(residuals)} documents cannot show heavy tails; the interval may be too narrow"
    return f"as few as {makers:.1f} documents make the spread; the interval may be too narrow"


def few_clusters(documents: int, clusters: int, effective: float) -> str:
    """A caution where clusters say as little as a few of equal size would; "" for unrelated documents, or enough, and
    for one cluster, which has no interval."""
    if clusters in (1, documents) or effective >= FEW:
        return ""
    as_few = f" as uneven as {effective:.1f} equal ones" if effective < 0.95 * clusters else ""
    return f"{clusters} clusters{as_few} are few; intervals and bounds may be too narrow"
