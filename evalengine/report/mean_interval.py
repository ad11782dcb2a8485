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
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    share = successes / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count)
    # at the ends it touches 0 or 1 exactly, which rounding may miss by a bit
    return 0.0 if successes == 0 else middle - half, 1.0 if successes == count else middle + half


def mean_interval(scores: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The interval of the mean of documents' scores: Wilson's for 0/1 scores, else Student's t.

    None where the scores cannot tell: fewer than two, one that is not finite, or (not 0/1) all of them equal.
    """
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        return None
    if set(scores) <= {0.0, 1.0}:
        return wilson(int(sum(scores)), len(scores), confidence)
    if len(set(scores)) == 1:
        return None
    from evalengine.report.intervals import t_interval  # SciPy takes most of a second: not every run's report needs it

    return t_interval(fmean(scores), stdev(scores) / math.sqrt(len(scores)), len(scores), confidence)
