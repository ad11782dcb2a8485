"""The groups of tasks that a run's results name (lm-eval's `group_subtasks`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from evalengine.records.lm_eval_file import results_files
from evalengine.report.read.run import Run
from evalengine.util.plain_files import read_json


def group_subtasks(run: Run) -> dict[str, list[str]]:
    """The members of each group that the results file names; none for a baseline."""
    try:
        listed = read_json(results_files(run.source)[-1]).get("group_subtasks")
    except (OSError, ValueError, IndexError, AttributeError):
        return {}
    groups = listed.items() if isinstance(listed, dict) else ()
    return {name: [str(task) for task in tasks] for name, tasks in groups if isinstance(tasks, list) and tasks}


def leaves(name: str, subtasks: Mapping[str, Sequence[str]], above: tuple[str, ...] = ()) -> Iterator[str]:
    """The tasks of a group, those of its groups included; a task's own name. A task of two groups may come twice."""
    if name not in subtasks or name in above:
        yield name
        return
    for member in subtasks[name]:
        yield from leaves(member, subtasks, (*above, name))


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


def group_documents(run: Run, subtasks: Mapping[str, Sequence[str]], key: tuple[str, str, str]) -> int | None:
    """How many documents a group's mean covers; None for a key of no group, or of a group without scored documents."""
    group, metric, filter_name = key
    if group not in subtasks:
        return None
    tasks = dict.fromkeys(leaves(group, subtasks))
    return sum(len(run.scores.get((task, metric, filter_name), {})) for task in tasks) or None
