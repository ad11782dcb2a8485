"""How a task's values become numbers: the metrics, their keys in the results, and their aggregations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MetricKey = tuple[str, str]  # (metric, filter)
# A score, (log-likelihood, weight) for the weighted aggregations, or whatever an `Aggregation` of the task's own takes.
MetricValue = Any


@dataclass(frozen=True)
class Metric:
    """How the values of one metric become one number: an aggregation of harness.metrics by its name, or another one."""

    aggregation: str | Aggregation = "mean"
    higher_is_better: bool = True


@dataclass(frozen=True)
class Aggregation:
    """How the values of one metric become one number, where harness.metrics has no such aggregation."""

    value: Callable[[list[Any]], Any]
    stderr: Callable[[list[Any], int], float | None]  # (at least two values, resamples); None: there is none


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate from n samples of a document, `correct` of them right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.
    """
    assert 0 <= correct <= n and 1 <= k <= n
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
