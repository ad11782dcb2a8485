"""The interval of one run's metric: a mean of documents' scores, or of several tasks' means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
Bounds = tuple[float, float]


def wilson(successes: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share: `successes` of `count` > 0, which may be a sum of parts.

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


def reported_interval(value: float, stderr: float | None, documents: int | None) -> tuple[float, float] | None:
    """The interval of a result of which only its standard error is known, and how many documents it is of: Wilson's for
    a share, with as many documents as would have that error (`mean_interval`), else value -+ 1.96 stderr. None where
    the error is not known or says nothing."""
    if stderr is None or not (math.isfinite(value) and math.isfinite(stderr)) or stderr < 0:
        return None
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    if 0 <= value <= 1:
        count = value * (1 - value) / stderr**2 if stderr else documents
        return _wilson(value, count, quantile) if count else None
    return (value - quantile * stderr, value + quantile * stderr) if stderr else None


def mean_interval(
    scores: Sequence[float], confidence: float = CONFIDENCE, clusters: Sequence[str] | None = None
) -> tuple[float, float] | None:
    """The interval of the mean of documents' scores: Wilson's for scores in [0, 1], else Student's t. `clusters` names
    each document's group, where documents are related.

    Shares that are not 0/1 (F1, pass@1 over several samples), and clusters, take Wilson's interval with as many
    documents as would have their standard error, mean (1 - mean) / stderr^2, and Student's quantile for the normal one
    (Korn & Graubard 1998, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated
    from Survey Data", Survey Methodology 24(2)): Student's own covers .84 to .91 where few of them are above 0.

    None where the scores cannot tell: fewer than two, one that is not finite, one cluster, or (not 0/1) all of them
    equal.
    """
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        return None
    related = clusters is not None and len(set(clusters)) < len(scores)
    if set(scores) <= {0.0, 1.0} and not related:
        return wilson(int(sum(scores)), len(scores), confidence)
    return _by_stderr(scores, confidence, clusters if related else None)


def _by_stderr(
    scores: Sequence[float], confidence: float, clusters: Sequence[str] | None
) -> tuple[float, float] | None:
    # Importing SciPy takes most of a second, which not every run's report needs.
    import numpy as np

    from evalengine.report.stats.intervals import cluster_degrees, clustered_stderr, t_interval
    from evalengine.report.stats.paired import cluster_codes

    codes = cluster_codes(clusters, len(scores))
    degrees = cluster_degrees(np.bincount(codes).astype(np.float64))
    if not degrees > 0:
        return None
    mean, stderr = fmean(scores), clustered_stderr(np.asarray(scores, dtype=np.float64), codes)
    answers = set(scores) <= {0.0, 1.0}
    if stderr == 0 and not answers:
        return None
    if min(scores) < 0 or max(scores) > 1:
        return t_interval(mean, stderr, degrees, confidence)
    independent = mean * (1 - mean) / stderr**2 if stderr else degrees + 1
    if answers:
        independent = min(float(len(scores)), independent)
    return _wilson(mean, independent, t_interval(0.0, 1.0, degrees, confidence)[1])


def weighted_interval(
    values: Sequence[float], intervals: Sequence[Bounds | None], weights: Sequence[float]
) -> Bounds | None:
    """The interval of sum w_i t_i, by variance estimates recovered from the parts' own intervals.

    With parts t_i in (l_i, u_i) and weights w_i: sum w_i t_i -+ sqrt(sum w_i^2 (t_i - l_i)^2), and with u_i above
    (Zou, Huang & Zhang 2009, "A note on confidence interval estimation for a linear function of binomial proportions",
    Computational Statistics & Data Analysis 53(4)). The parts are fixed: the interval is about their documents.
    None where a part has no interval.
    """
    mean = math.fsum(weight * value for value, weight in zip(values, weights, strict=True))
    below, above = [], []
    for value, bounds, weight in zip(values, intervals, weights, strict=True):
        if bounds is None:
            return None
        below.append((weight * (value - bounds[0])) ** 2)
        above.append((weight * (bounds[1] - value)) ** 2)
    return mean - math.sqrt(math.fsum(below)), mean + math.sqrt(math.fsum(above))


def scaled(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """All documents' scores, one task after the other, each times its task's weight over the task's share of the
    documents. Their plain mean is the weighted mean, and the permutation test may still exchange labels document by
    document."""
    total = sum(map(len, columns))
    joined: list[float] = []
    for values, weight in zip(columns, weights, strict=True):
        factor = weight * total / len(values)
        joined += values if math.isclose(factor, 1.0, rel_tol=1e-12) else [factor * value for value in values]
    return joined
