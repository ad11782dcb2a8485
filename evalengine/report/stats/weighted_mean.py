"""The mean of several tasks' means: its interval, and the documents' scores whose plain mean it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

Bounds = tuple[float, float]


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
