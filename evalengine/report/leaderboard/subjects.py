"""Groups of tasks (lm-eval's `group_subtasks`) and subjects within a task (a field of its documents)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.plain_files import parse_json
from evalengine.report.leaderboard.pairing import Shared
from evalengine.report.read.groups import group_subtasks, leaves
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.run import Run

SUBJECT = "subject"  # the field that is looked for without being asked (MMLU's)
MAX_SUBJECTS = 500  # a field of more values is no subject


def group_tasks(runs: Sequence[Run], tasks: Sequence[str]) -> dict[str, list[str]]:
    """group -> its tasks, groups of groups resolved; those of two tasks and more, which some run's results name."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for name, members in group_subtasks(run).items():
            said.setdefault(name, members)
    found = {name: [task for task in dict.fromkeys(leaves(name, said)) if task in tasks] for name in said}
    return {name: members for name, members in found.items() if len(members) > 1}


def subjects(runs: Sequence[Run], shared: Mapping[str, Shared], by: str | None) -> dict[str, dict[str, list[int]]]:
    """task -> the field's value -> places of its documents in `Shared.rows`.

    by: the field; None takes `subject`, where documents have one. Raises `ConfigError` if no document has `by`.
    """
    found: dict[str, dict[str, list[int]]] = {}
    names: set[str] = set()
    for place in dict.fromkeys(one.runs[0] for one in shared.values() if one.rows):
        if runs[place].kind == "baseline" or (by is None and not _have(runs[place].source, SUBJECT)):
            continue
        for task, rows in newest(runs[place].source)[1].items():
            if task not in shared or not shared[task].rows or shared[task].runs[0] != place:
                continue
            documents = {row["doc_id"]: row.get("doc") or {} for row in rows}
            names |= {name for document in list(documents.values())[:1] for name in document}
            values = _values(documents, shared[task].documents(place), by or SUBJECT)
            if 1 < len(values) <= MAX_SUBJECTS:
                found[task] = values
    if by is not None and not found:
        has = f"; their fields are {', '.join(sorted(names)[:20])}" if names else ""
        raise ConfigError(
            f"compare: --by {by}: no task's documents have this field with 2 to {MAX_SUBJECTS} values{has}"
        )
    return found


def _have(source: Path, field: str) -> bool:
    """Whether the first document of some task has the field: a line a file is read, not every sample."""
    for file in (source if source.is_dir() else source.parent).glob("samples_*.jsonl"):
        try:
            with open(file, encoding="utf-8") as lines:
                if field in (parse_json(lines.readline()).get("doc") or {}):
                    return True
        except (OSError, ValueError, AttributeError, TypeError):
            continue
    return False


def _values(documents: Mapping[int, Mapping[str, Any]], rows: Sequence[int], field: str) -> dict[str, list[int]]:
    """The field's values, sorted; empty unless every document has one that is a word or a number."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, doc in enumerate(rows):
        value = documents.get(doc, {}).get(field)
        if not isinstance(value, str | int | float):
            return {}
        found[str(value)].append(place)
    return dict(sorted(found.items()))
