"""Means over several tasks, or over the subjects of one: macro (of their values) and micro (of all documents)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.report.leaderboard.board import Contest, Score, contest, pair_tests
from evalengine.report.leaderboard.pairing import Shared
from evalengine.report.read.groups import leaves
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import across_tasks
from evalengine.report.stats.metric_interval import group_cautions, scaled, weighted_interval
from evalengine.util.plain_files import parse_json

SUBJECT = "subject"  # the field that is looked for by default (MMLU's)
MAX_SUBJECTS = 500  # a field of more values is no subject


def group_tasks(runs: Sequence[Run], tasks: Sequence[str]) -> dict[str, list[str]]:
    """The tasks of each group that some run's results name, groups of groups resolved; groups of two tasks or more."""
    subtasks: dict[str, list[str]] = {}
    for run in runs:
        for name, members in run.groups.items():
            subtasks.setdefault(name, members)
    groups = {name: [task for task in leaves(name, subtasks) if task in tasks] for name in subtasks}
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


@dataclass(frozen=True)
class Part:
    """One task's metric, or a subject's documents of it: every model's values of the same documents."""

    label: str
    key: ScoreKey
    better: bool
    columns: Mapping[int, Sequence[float]]  # values by the model's place
    clusters: Sequence[str] | None = None  # each document's cluster, where some are related


@dataclass(frozen=True)
class Group:
    """Parts and their means. The parts are listed, not tested: the family of tests is that of the means."""

    name: str
    parts: list[Contest]
    means: list[Contest]  # macro and micro; macro alone where all parts are of one size
    untested: tuple[ScoreKey, ...] = ()  # the metrics of the parts, where those are tasks
    whole: list[Contest] = field(default_factory=list)  # for a task's subjects, the micro mean: the task's own value


def group(name: str, parts: Sequence[Part], count: int, of_one_task: bool = False) -> Group:
    """The parts of `count` models under one name. A model without a value in one of the parts has no mean.

    of_one_task: the parts are a task's subjects: their micro mean is the task's own value, which is tested already."""
    first = parts[0].key
    metric = first[1] if all(part.key[1] == first[1] for part in parts) else "first metric of each"
    filter_name = first[2] if all(part.key[2] == first[2] for part in parts) else ""
    whole = [place for place in range(count) if all(place in part.columns for part in parts)]
    single = [
        replace(
            contest(part.key, part.better, part.columns, count, tested=False, clusters=part.clusters),
            key=(part.label, *part.key[1:]),
        )
        for part in parts
    ]
    sizes = [len(part.columns[whole[0]]) for part in parts] if whole else []
    means = [_mean((name, metric, filter_name), kind, parts, single, whole) for kind in _kinds(sizes)]
    if of_one_task and len(means) > 1:
        return Group(name, single, means[:1], whole=[replace(means[1], tests=[])])
    return Group(name, single, means, () if of_one_task else tuple(part.key for part in parts))


def _kinds(sizes: Sequence[int]) -> list[str]:
    """The means to give; for parts of one size both are the same."""
    return [] if len(sizes) < 2 else ["macro"] if len(set(sizes)) == 1 else ["macro", "micro"]


def _mean(key: ScoreKey, kind: str, parts: Sequence[Part], single: Sequence[Contest], whole: Sequence[int]) -> Contest:
    sizes = [len(part.columns[whole[0]]) for part in parts]
    total = sum(sizes)
    weights = [1 / len(parts) if kind == "macro" else size / total for size in sizes]
    scores: list[Score | None] = [None] * len(single[0].scores)
    for place in whole:
        scores[place] = _weighted({entry.key[0]: score for entry in single if (score := entry.scores[place])}, weights)
    share = all(entry.share for entry in single)
    columns = {place: scaled([part.columns[place] for part in parts], weights) for place in whole}
    tests = pair_tests(columns, parts[0].better, _clusters(parts), list(zip(sizes, weights, strict=True)))
    return Contest(key, parts[0].better, share, total, scores, tests, kind)


def _weighted(scores: Mapping[str, Score], weights: Sequence[float]) -> Score:
    """The weighted mean of the parts' scores, with its interval."""
    held = [*scores.values()]
    value = math.fsum(weight * score.value for score, weight in zip(held, weights, strict=True))
    bounds = weighted_interval([s.value for s in held], [s.interval for s in held], weights)
    found = group_cautions({label: score.cautions for label, score in scores.items()})
    return Score(value, bounds, cautions=tuple(found if bounds is not None else ()))


def _clusters(parts: Sequence[Part]) -> list[str] | None:
    """The clusters of all parts' documents, one part after the other; None where none are related. A cluster stays
    within its task (`across_tasks`), but not within its subject."""
    if all(part.clusters is None for part in parts):
        return None
    clusters = []
    for place, part in enumerate(parts):
        count = len(next(iter(part.columns.values())))
        names = part.clusters or [f"{place} {number}" for number in range(count)]
        clusters += across_tasks(part.key[0], names)
    return clusters


def average_parts(parts_by_task: Mapping[str, Sequence[Part]]) -> Iterator[Part]:
    """Each task's first metric that is a share and better if higher: an average over tasks is the mean of these."""
    for parts in parts_by_task.values():
        for part in parts:
            if part.better and all(0 <= v <= 1 for values in part.columns.values() for v in values):
                yield part
                break
