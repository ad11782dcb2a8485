"""Metrics of groups of tasks, made of the tasks' metrics as lm-eval 0.4.13 aggregates them (`api/group.py`).

The mean is over documents (`weight_by_size`) or over tasks; its standard error is pooled from the
tasks' errors, or that of a mean of independent means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evalengine.config.schema import GroupConfig, leaves
from evalengine.harness.metrics import NOT_AVAILABLE
from evalengine.records.lm_eval import GroupResult, TaskResult, Value


def group_results(groups: Mapping[str, GroupConfig], tasks: Sequence[TaskResult]) -> list[GroupResult]:
    """One result for each group, in the groups' order; groups within groups count by their tasks."""
    by_name = {task.name: task for task in tasks}
    return [_result(name, groups, by_name) for name in groups]


def _result(name: str, groups: Mapping[str, GroupConfig], by_name: Mapping[str, TaskResult]) -> GroupResult:
    group, tasks = groups[name], [by_name[leaf] for leaf in leaves(name, groups)]
    metrics: dict[str, Value] = {}
    for entry in group.aggregate_metric_list or []:
        for filter_name in _filters(entry, tasks):
            metrics.update(_aggregated(entry, filter_name, tasks))
    keys = [key for key in metrics if not key.partition(",")[0].endswith("_stderr")]
    shots = {task.num_fewshot for task in tasks}
    better: dict[str, bool | None] = {}
    for task in tasks:
        for metric, value in task.higher_is_better.items():
            better[metric] = value if better.get(metric, value) == value else None
    return GroupResult(
        name=name,
        alias=group.alias or name,
        version=NOT_AVAILABLE if group.version is None else str(group.version),
        children=tuple(group.tasks),
        metrics=metrics,
        counts={key: sum(task.effective for task in tasks if key in task.metrics) for key in keys},
        higher_is_better=better,
        effective=sum(task.effective for task in tasks),
        num_fewshot=shots.pop() if len(shots) == 1 else None,
    )


def _filters(entry: Mapping[str, Any], tasks: Sequence[TaskResult]) -> list[str]:
    """The filters that the entry names, or all that the tasks have for its metric."""
    filter_list = entry.get("filter_list")
    if filter_list is not None:
        return [filter_list] if isinstance(filter_list, str) else list(filter_list)
    keys = (key.partition(",") for task in tasks for key in task.metrics)
    return sorted({filter_name for metric, _, filter_name in keys if metric == entry["metric"]})


def _aggregated(entry: Mapping[str, Any], filter_name: str, tasks: Sequence[TaskResult]) -> Iterator[tuple[str, Value]]:
    """The metric and its standard error; nothing where no task has it."""
    metric = entry["metric"]
    key, error_key = f"{metric},{filter_name}", f"{metric}_stderr,{filter_name}"
    having = [task for task in tasks if key in task.metrics]
    if not having:
        return
    sizes = [task.effective for task in having]
    weights = sizes if entry.get("weight_by_size", True) else [1] * len(sizes)
    values = [float(task.metrics[key]) for task in having]
    yield key, math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    errors = [error for task in having if isinstance(error := task.metrics[error_key], float)]
    if len(errors) < len(having):
        yield error_key, NOT_AVAILABLE
    elif weights is sizes:
        yield error_key, pooled_stderr(errors, sizes)
    else:
        yield error_key, math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)


def pooled_stderr(errors: Sequence[float], sizes: Sequence[int]) -> float:
    """Standard error of a mean over all documents of several tasks, from each task's own.

    At least one task has two documents.
    """
    squares = math.fsum((size - 1) * size * error**2 for error, size in zip(errors, sizes, strict=True))
    return math.sqrt(squares / (sum(sizes) - len(sizes)) / sum(sizes))
