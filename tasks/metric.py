"""How a task's values become numbers: the metrics, their keys in the results, and their aggregations."""

from __future__ import annotations

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
