"""The interval of one run's metric: a mean of documents' scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95


def wilson(successes: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share: `successes` of `count` > 0.

    With p = k / n and z the normal quantile: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    (Wilson 1927, Journal of the American Statistical Association 22; recommended for any n by Brown, Cai & DasGupta
    2001, Statistical Science 16(2)). It has a width at 0 and 1, where value -+ 1.96 stderr claims certainty.
    """
    return _wilson(successes / count, count, NormalDist().inv_cdf((1 + confidence) / 2))


def _wilson(share: float, count: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval of a share of `count` documents, which need not be a whole number."""
    z2 = quantile**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count)
    # At the ends the interval touches 0 or 1 exactly, which rounding may miss by a bit.
    return 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half


def mean_interval(
    scores: Sequence[float], confidence: float = CONFIDENCE, clusters: Sequence[str] | None = None
) -> tuple[float, float] | None:
    """The interval of the mean of documents' scores: Wilson's for 0/1 scores, else Student's t. `clusters` names each
    document's group, where documents are related.

    None where the scores cannot tell: fewer than two, one that is not finite, or (not 0/1) all of them equal.
    """
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        return None
    if clusters is not None and len(set(clusters)) < len(scores):
        return _clustered(scores, confidence, clusters)
    if set(scores) <= {0.0, 1.0}:
        return wilson(int(sum(scores)), len(scores), confidence)
    if len(set(scores)) == 1:
        return None
    # Importing SciPy takes most of a second, which not every run's report needs.
    from evalengine.report.stats.intervals import t_interval

    return t_interval(fmean(scores), stdev(scores) / math.sqrt(len(scores)), len(scores), confidence)


def _clustered(scores: Sequence[float], confidence: float, clusters: Sequence[str]) -> tuple[float, float] | None:
    """Student's t over clusters; for 0/1 scores Wilson's with as many documents as would have the clustered error
    (Korn & Graubard 1998, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated
    from Survey Data", Survey Methodology 24(2)), with Student's quantile for the normal one. None for one cluster.
    """
    import numpy as np

    from evalengine.report.stats.intervals import clustered_stderr, t_interval
    from evalengine.report.stats.paired import cluster_codes

    codes = cluster_codes(clusters, len(scores))
    groups = int(codes.max()) + 1
    if groups < 2:
        return None
    mean, stderr = fmean(scores), clustered_stderr(np.asarray(scores, dtype=np.float64), codes)
    if not set(scores) <= {0.0, 1.0}:
        return t_interval(mean, stderr, groups, confidence) if stderr else None
    independent = min(float(len(scores)), mean * (1 - mean) / stderr**2) if stderr else float(groups)
    return _wilson(mean, independent, t_interval(0.0, 1.0, groups, confidence)[1])
