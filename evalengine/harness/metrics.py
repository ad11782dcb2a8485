"""Turns the documents' values into a task's results, and these into a group's: aggregation and standard error.

Both follow lm-eval 0.4.13 (a group's: `api/group.py`). A group's mean is over documents (`weight_by_size`) or over
tasks; its standard error is pooled from the tasks' errors, or that of a mean of independent means.

Sums are `math.fsum`: correctly rounded, so a result depends neither on the Python version (3.12 made `sum` compensated)
nor on the order. For scores of 0 and 1 lm-eval's `sum` gives the same mean; else the two differ in the last places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from evalengine.config.schema import GroupConfig, leaves
from evalengine.records.lm_eval import GroupResult, TaskResult, Value
from evalengine.tasks.base import Task
from evalengine.tasks.metric import Aggregation, MetricKey, MetricValue

NOT_AVAILABLE = "N/A"
ROWS = 100  # resamples drawn at once; for 5,153 values they take 4 MB


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
    return perplexity([weighted_mean(items)])


def perplexity(values: Sequence[float]) -> float:
    """exp of minus the mean log-likelihood; infinite where that overflows."""
    try:
        return math.exp(-mean(values))
    except OverflowError:
        return math.inf


def perplexity_stderr(values: Sequence[float], iterations: int) -> float:
    """lm-eval's bootstrapped standard error: the standard deviation of the perplexities of `iterations` resamples,
    drawn in chunks of 1000 by Python's generator seeded with the chunk's number. NumPy's generator has the same state
    and gives the same numbers; it takes 9 s for 100,000 resamples of 5,153 values."""
    perplexities, items = [], np.asarray(values, dtype=np.float64)
    size = min(1000, iterations)
    for chunk in range(iterations // size):
        generator = np.random.RandomState([chunk])  # a list, as a plain number seeds another state
        for begin in range(0, size, ROWS):
            drawn = generator.random_sample((min(ROWS, size - begin), len(items))) * len(items)
            with np.errstate(over="ignore"):
                perplexities.append(np.exp(-items[drawn.astype(np.int64)].mean(axis=1)))
    resamples = np.concatenate(perplexities)
    with np.errstate(invalid="ignore", over="ignore"):
        return float(resamples.std(ddof=1))


def bits_per_byte(items: Sequence[tuple[float, int]]) -> float:
    return -weighted_mean(items) / math.log(2)


AGGREGATIONS = {
    "mean": Aggregation(mean, lambda values, _: mean_stderr(values)),
    "perplexity": Aggregation(perplexity, perplexity_stderr),
    "weighted_perplexity": Aggregation(weighted_perplexity, lambda *_: None),
    "bits_per_byte": Aggregation(bits_per_byte, lambda *_: None),
}
WEIGHTED = ("weighted_perplexity", "bits_per_byte")  # their values are pairs: log-likelihood, and words or bytes


def summarize(
    task: Task, per_doc: Sequence[dict[MetricKey, MetricValue]], bootstrap_iterations: int = 100_000
) -> dict[str, float | str]:
    """The task's results, keyed "metric,filter" and "metric_stderr,filter", in `process_results`' order.

    per_doc: one `Task.process_results` a document, at least one. With a single document the standard error is "N/A".
    bootstrap_iterations: resamples behind a standard error that has no formula.
    """
    assert per_doc, "a task has at least one document"
    aggregations = task.aggregation()
    results: dict[str, float | str] = {}
    for key in dict.fromkeys(key for doc in per_doc for key in doc):
        metric, filter_name = key
        values = [doc[key] for doc in per_doc if key in doc]
        named = aggregations.get(metric, "mean")
        aggregation = AGGREGATIONS[named] if isinstance(named, str) else named
        error = aggregation.stderr(values, bootstrap_iterations) if len(values) > 1 else None
        results[f"{metric},{filter_name}"] = aggregation.value(values)
        results[f"{metric}_stderr,{filter_name}"] = NOT_AVAILABLE if error is None else error
    return results


def group_results(groups: Mapping[str, GroupConfig], tasks: Sequence[TaskResult]) -> list[GroupResult]:
    """One result for each group, in the groups' order; groups within groups count by their tasks."""
    by_name = {task.name: task for task in tasks}
    results = []
    for name, group in groups.items():
        members = [by_name[leaf] for leaf in leaves(name, groups)]
        metrics: dict[str, Value] = {}
        for entry in group.aggregate_metric_list or []:
            metrics.update(_aggregated(entry, members))
        better: dict[str, bool | None] = {}
        for task in members:
            for metric, value in task.higher_is_better.items():
                better[metric] = value if better.get(metric, value) == value else None
        shots = {task.num_fewshot for task in members}
        keys = [key for key in metrics if not key.partition(",")[0].endswith("_stderr")]
        result = GroupResult(
            name=name,
            alias=group.alias or name,
            version=NOT_AVAILABLE if group.version is None else str(group.version),
            children=tuple(group.tasks),
            metrics=metrics,
            counts={key: sum(task.effective for task in members if key in task.metrics) for key in keys},
            higher_is_better=better,
            effective=sum(task.effective for task in members),
            num_fewshot=shots.pop() if len(shots) == 1 else None,
        )
        results.append(result)
    return results


def _aggregated(entry: Mapping[str, Any], tasks: Sequence[TaskResult]) -> Iterator[tuple[str, Value]]:
    """The metric and its standard error, under the filters that the entry names, or all that the tasks have for it;
    nothing where no task has it."""
    metric, filters = entry["metric"], entry.get("filter_list")
    if filters is None:
        keys = (key.partition(",") for task in tasks for key in task.metrics)
        filters = sorted({filter_name for name, _, filter_name in keys if name == metric})
    for filter_name in [filters] if isinstance(filters, str) else filters:
        key, error_key = f"{metric},{filter_name}", f"{metric}_stderr,{filter_name}"
        having = [task for task in tasks if key in task.metrics]
        if not having:
            continue
        sizes = [task.effective for task in having]
        weights = sizes if entry.get("weight_by_size", True) else [1] * len(sizes)
        values = [float(task.metrics[key]) for task in having]
        yield key, math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        errors = [error for task in having if isinstance(error := task.metrics[error_key], float)]
        if len(errors) < len(having):
            yield error_key, NOT_AVAILABLE
        elif weights is sizes:  # at least one task has two documents
            squares = math.fsum((size - 1) * size * error**2 for error, size in zip(errors, sizes, strict=True))
            yield error_key, math.sqrt(squares / (sum(sizes) - len(sizes)) / sum(sizes))
        else:
            yield error_key, math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)
