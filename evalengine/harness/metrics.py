"""From the documents' values to a task's results: aggregation and standard error, as lm-eval 0.4.12 defines them.

Sums are `math.fsum`: correctly rounded, so a result depends neither on the Python version (3.12 made `sum` compensated)
nor on the order. For scores of 0 and 1 lm-eval's `sum` gives the same mean, else it is within a few last places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evalengine.tasks.base import MetricKey, MetricValue, Task

NOT_AVAILABLE = "N/A"


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_stderr(values: Sequence[float]) -> float:
    """Standard error of the mean: sample standard deviation (n - 1) over sqrt(n); at least two values."""
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1)) / math.sqrt(len(values))


def weighted_mean(items: Sequence[tuple[float, int]]) -> float:
    """Sum of the log-likelihoods over the sum of the weights (words or bytes)."""
    return math.fsum(loglikelihood for loglikelihood, _ in items) / sum(weight for _, weight in items)


def weighted_perplexity(items: Sequence[tuple[float, int]]) -> float:
    """exp of minus the log-likelihood per word or byte; infinite where that overflows."""
    try:
        return math.exp(-weighted_mean(items))
    except OverflowError:
        return math.inf


def bits_per_byte(items: Sequence[tuple[float, int]]) -> float:
    return -weighted_mean(items) / math.log(2)


AGGREGATIONS: dict[str, Callable[[Any], float]] = {
    "mean": mean,
    "weighted_perplexity": weighted_perplexity,
    "bits_per_byte": bits_per_byte,
}
STDERRS: dict[str, Callable[[Any], float]] = {"mean": mean_stderr}  # the others have no standard error: "N/A"


def summarize(task: Task, per_doc: Sequence[dict[MetricKey, MetricValue]]) -> dict[str, float | str]:
    """The task's results, keyed "metric,filter" and "metric_stderr,filter", in `process_results`' order.

    per_doc: one `Task.process_results` a document, at least one. With a single document the standard error is "N/A".
    """
    assert per_doc, "a task has at least one document"
    aggregations = task.aggregation()
    results: dict[str, float | str] = {}
    for metric, filter_name in per_doc[0]:
        values = [doc[metric, filter_name] for doc in per_doc]
        aggregation = aggregations[metric]
        stderr = STDERRS.get(aggregation)
        results[f"{metric},{filter_name}"] = AGGREGATIONS[aggregation](values)
        results[f"{metric}_stderr,{filter_name}"] = stderr(values) if stderr and len(values) > 1 else NOT_AVAILABLE
    return results
