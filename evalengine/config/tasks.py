"""Checks the tasks and groups of a configuration; each problem is a sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from evalengine.config.schema import Config, GroupConfig, TaskConfig
from evalengine.config.values import least_problems, size_problems

MAX_CODE_TIMEOUT = 86_400
TASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")


def task_problems(name: str, task: TaskConfig) -> Iterator[str]:
    where, generation = f"tasks.{name}", task.generation
    if not TASK_NAME.fullmatch(name):
        yield f"{where[:120]!r}: a task's name is part of file names: up to 100 of A-Z a-z 0-9 _ -, no - first"
    if task.cls is None:
        yield f"{where}.cls: names no task class"
    if task.version is not None and not math.isfinite(task.version):
        yield f"{where}.version={task.version}: must be a finite number"
    yield from least_problems(f"{where}.num_fewshot", task.num_fewshot, 0)
    yield from least_problems(f"{where}.generation.max_gen_toks", generation.max_gen_toks, 1)
    yield from least_problems(f"{where}.generation.temperature", generation.temperature, 0)
    yield from least_problems(f"{where}.generation.top_k", generation.top_k, 0)
    yield from least_problems(f"{where}.generation.repeats", generation.repeats, 1)
    yield from least_problems(f"{where}.repeats", task.repeats, 1)
    if task.code_timeout is not None:
        yield from size_problems(f"{where}.code_timeout", task.code_timeout, MAX_CODE_TIMEOUT, " seconds")
    if generation.top_p is not None and not 0 < generation.top_p <= 1:
        yield f"{where}.generation.top_p={generation.top_p}: must lie in (0, 1]"


def group_problems(name: str, config: Config) -> Iterator[str]:
    where, group = f"groups.{name}", config.groups[name]
    if name in config.tasks:
        yield f"{where}: is a task's name, too; rename one of them"
    if not TASK_NAME.fullmatch(name):
        yield f"{where[:120]!r}: a group's name is up to 100 of A-Z a-z 0-9 _ -, no - first"
    if missing := [child for child in group.tasks if child not in config.tasks and child not in config.groups]:
        yield f"{where}.tasks: {', '.join(missing)} are not selected; add them to the file's defaults"
    if not group.tasks:
        yield f"{where}.tasks: names no task"
    elif name in _below(name, config.groups):
        yield f"{where}.tasks: the group is part of itself"
    entries = group.aggregate_metric_list
    for entry in entries if isinstance(entries, list) else [] if entries is None else [entries]:
        if not isinstance(entry, dict) or not isinstance(entry.get("metric"), str):
            yield f"{where}.aggregate_metric_list: {str(entry)[:60]} is not {{metric, weight_by_size, filter_list}}"
        elif unknown := {*entry} - {"metric", "weight_by_size", "filter_list", "aggregation"}:
            yield f"{where}.aggregate_metric_list: {', '.join(map(str, unknown))}: no such setting"
        elif entry.get("aggregation", "mean") != "mean" or not isinstance(entry.get("weight_by_size", True), bool):
            yield f"{where}.aggregate_metric_list.{entry['metric']}: only means are built, weight_by_size true or false"


def _below(name: str, groups: dict[str, GroupConfig]) -> set[str]:
    """The groups within a group, at any depth."""
    below: set[str] = set()
    waiting = [*groups[name].tasks]
    while waiting:
        child = waiting.pop()
        if child in groups and child not in below:
            below.add(child)
            waiting.extend(groups[child].tasks)
    return below
