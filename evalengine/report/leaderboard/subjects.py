"""Groups of tasks (lm-eval's `group_subtasks`) and subjects within a task (a field of its documents)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.report.leaderboard.pairing import Shared
from evalengine.report.read.groups import leaves
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.run import Run
from evalengine.util.plain_files import parse_json

SUBJECT = "subject"  # the field that is looked for by default (MMLU's)
MAX_SUBJECTS = 500  # a field of more values is no subject


def group_tasks(runs: Sequence[Run], tasks: Sequence[str]) -> dict[str, list[str]]:
    """The tasks of each group that some run's results name, groups of groups resolved; groups of two tasks or more."""
    subtasks: dict[str, list[str]] = {}
    for run in runs:
        for name, members in run.groups.items():
            subtasks.setdefault(name, members)
    groups = {name: [task for task in dict.fromkeys(leaves(name, subtasks)) if task in tasks] for name in subtasks}
    return {name: members for name, members in groups.items() if len(members) > 1}


def subjects(runs: Sequence[Run], shared: Mapping[str, Shared], by: str | None) -> dict[str, dict[str, list[int]]]:
    """Places of documents in `Shared.rows`, by task and by the field's value.

    by: the field; None takes `subject`, where documents have one. Raises `ConfigError` if no document has `by`.
    """
    places_by_task: dict[str, dict[str, list[int]]] = {}
    names: set[str] = set()
    for place in dict.fromkeys(common.runs[0] for common in shared.values() if common.rows):
        if runs[place].kind == "baseline" or (by is None and not _has_field(runs[place].source, SUBJECT)):
            continue
        for task, rows in newest(runs[place].source)[1].items():
            if task not in shared or not shared[task].rows or shared[task].runs[0] != place:
                continue
            documents = {row["doc_id"]: row.get("doc") or {} for row in rows}
            names |= {name for document in list(documents.values())[:1] for name in document}
            values = _values(documents, shared[task].documents(place), by or SUBJECT)
            if 1 < len(values) <= MAX_SUBJECTS:
                places_by_task[task] = values
    if by is not None and not places_by_task:
        fields = f"; their fields are {', '.join(sorted(names)[:20])}" if names else ""
        raise ConfigError(f"--by {by}: no task's documents have this field with 2 to {MAX_SUBJECTS} values{fields}")
    return places_by_task


def _has_field(source: Path, field: str) -> bool:
    """Whether the first document of some task has the field. One line of each file is read, not every sample."""
    for file in (source if source.is_dir() else source.parent).glob("samples_*.jsonl"):
        try:
            with open(file, encoding="utf-8") as lines:
                if field in (parse_json(lines.readline()).get("doc") or {}):
                    return True
        except (OSError, ValueError, AttributeError, TypeError):
            continue
    return False


def _values(documents: Mapping[int, Mapping[str, Any]], rows: Sequence[int], field: str) -> dict[str, list[int]]:
    """Places of the documents by the field's value, sorted; empty unless every document has a text or number there."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, doc in enumerate(rows):
        value = documents.get(doc, {}).get(field)
        if not isinstance(value, str | int | float):
            return {}
        places[str(value)].append(place)
    return dict(sorted(places.items()))
