"""The groups of tasks that a run's results name (lm-eval's `group_subtasks`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from evalengine.report.numbers import exact_sum, mean
from evalengine.report.read.run import Run, ScoreKey


def leaves(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, those of its groups included, each once; a task's own name."""
    inside = [member for member in dict.fromkeys(below(subtasks, name)) if member not in subtasks]
    return inside if name in subtasks else [name]


def groups_first(names: Iterable[str], subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The names of tasks and groups, each group above what is in it."""
    named = dict.fromkeys(names)
    whole: dict[str, None] = dict.fromkeys((*named, *subtasks))  # a group without a mean has its place, too
    ordered = [name for name, _ in in_groups({"results": whole, "group_subtasks": subtasks}) if name in named]
    return [*ordered, *(name for name in named if name not in ordered)]  # groups in a circle are in no order


def in_groups(results: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(name, depth) of every task and group that has results, groups first and their own below them; each once."""
    groups: dict[str, list[str]] = results.get("group_subtasks") or {}
    members = {child for children in groups.values() for child in children}
    roots = [name for name in [*groups, *results["results"]] if name not in members]
    waiting = [(name, 0) for name in reversed(roots)]
    seen = set()
    while waiting:
        name, depth = waiting.pop()
        if name in seen or name not in results["results"]:
            continue
        seen.add(name)
        yield name, depth
        waiting.extend((child, depth + 1) for child in reversed(groups.get(name, [])))


Members = list[tuple[ScoreKey, float]]  # a group's tasks under one metric, each with its weight in the group's mean


def members(run: Run, key: ScoreKey) -> Members:
    """A group's tasks under one metric, weighted by their documents, or all alike.

    Empty for a key of no group, and where neither mean of the documents' scores is what the run reports.
    """
    return next(iter(_weightings(run, key).values()), [])


def members_of_both(a: Run, b: Run, key: ScoreKey) -> Members:
    """`members` of A, by the weights under which both runs' values are means of their documents' scores: where A's
    tasks have equal scores, more than one kind of weight gives A's value, and B's tells which is the group's.

    Empty where there is no such kind, or where the groups have other tasks.
    """
    ours, theirs = (_weightings(run, key) for run in (a, b))
    for kind, weighted in ours.items():
        if kind in theirs and {part for part, _ in weighted} == {part for part, _ in theirs[kind]}:
            return weighted
    return []


def _weightings(run: Run, key: ScoreKey) -> dict[str, Members]:
    """The kinds of weights that give a group's value, by what they count."""
    group, metric, name = key
    tasks = leaves(group, run.groups) if group in run.groups else ()
    keys: list[ScoreKey] = [(task, metric, name) for task in tasks]
    scores = [run.scores.get(task_key, {}) for task_key in keys]
    if not keys or key not in run.results or not all(scores):
        return {}
    total = sum(map(len, scores))
    means = [mean(own.values()) for own in scores]
    found = {}
    for kind, weights in (
        ("documents", [len(own) / total for own in scores]),
        ("tasks", [1 / len(keys)] * len(keys)),
    ):
        whole = exact_sum(weight * value for weight, value in zip(weights, means, strict=True))
        if math.isclose(whole, run.results[key][0], rel_tol=1e-6, abs_tol=1e-6):
            found[kind] = list(zip(keys, weights, strict=True))
    return found


def groups_of(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """The members of each group that a results file names."""
    listed = results.get("group_subtasks")
    groups = listed.items() if isinstance(listed, Mapping) else ()
    return {name: [str(task) for task in tasks] for name, tasks in groups if isinstance(tasks, list) and tasks}


def roots_of(groups: Mapping[str, Sequence[str]], names: Collection[str]) -> list[str]:
    """The requested ones of the `names` that have a metric: groups that are part of no other, and tasks that are in
    none. A group without a metric (a tag) is replaced by its members."""
    inside = {member for listed in groups.values() for member in listed}
    waiting = [name for name in dict.fromkeys([*groups, *names]) if name not in inside][::-1]
    roots: dict[str, None] = {}
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in names:
            roots[name] = None
        elif name not in seen:
            seen.add(name)
            waiting.extend(reversed(groups.get(name, ())))
    return list(roots)


def above(groups: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """The groups that hold a task or group, directly or by way of others."""
    return [group for group in groups if group != name and name in {*below(groups, group)}]


def group_documents(run: Run, key: ScoreKey) -> int | None:
    """How many documents a group's mean covers; None for a key of no group, or of a group without scored documents."""
    group, metric, filter_name = key
    if group not in run.groups:
        return None
    return sum(len(run.scores.get((task, metric, filter_name), {})) for task in leaves(group, run.groups)) or None


def below(groups: Mapping[str, Sequence[str]], name: str, seen: tuple[str, ...] = ()) -> Iterator[str]:
    """The tasks and groups in a group, those of its groups included; one of two groups may come twice."""
    for member in groups.get(name, ()) if name not in seen else ():
        yield member
        yield from below(groups, member, (*seen, name))
