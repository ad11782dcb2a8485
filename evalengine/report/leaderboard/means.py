"""Means over several tasks, or over the subjects of one: macro (of their values) and micro (of all documents)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.report.leaderboard.board import Contest, Score, contest, pair_tests
from evalengine.report.leaderboard.pairing import Shared
from evalengine.report.numbers import exact_sum
from evalengine.report.read.groups import leaves
from evalengine.report.read.lm_eval import newest
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.metric_interval import group_cautions, weighted_interval
from evalengine.report.stats.scores import Scores
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
class Group:
    """Parts and their means. The parts are listed, not tested: the family of tests is that of the means."""

    name: str
    parts: list[Contest]
    means: list[Contest]  # macro and micro; macro alone where all parts are of one size
    untested: tuple[ScoreKey, ...] = ()  # the metrics of the parts, where those are tasks
    whole: list[Contest] = field(default_factory=list)  # for a task's subjects, the micro mean: the task's own value


def group(name: str, parts: Mapping[str, Scores], count: int, of_one_task: bool = False) -> Group:
    """The parts of `count` models under one name, by label. A model without a value in one of the parts has no mean.

    of_one_task: the parts are a task's subjects: their micro mean is the task's own value, which is tested already."""
    keys = [part.key for part in parts.values()]
    metric = keys[0][1] if len({key[1] for key in keys}) == 1 else "first metric of each"
    filter_name = keys[0][2] if len({key[2] for key in keys}) == 1 else ""
    single = [contest(part, count, tested=False, key=(label, *part.key[1:])) for label, part in parts.items()]
    whole = [place for place in range(count) if all(place in part.columns for part in parts.values())]
    held = [replace(part, columns={place: part.columns[place] for place in whole}) for part in parts.values()]
    kinds = _kinds([*map(len, held)]) if whole else []
    means = [_mean((name, metric, filter_name), kind, held, single) for kind in kinds]
    if of_one_task and len(means) > 1:
        return Group(name, single, means[:1], whole=[replace(means[1], tests=[])])
    return Group(name, single, means, () if of_one_task else tuple(keys))


def _kinds(sizes: Sequence[int]) -> list[str]:
    """The means to give; for parts of one size both are the same."""
    return [] if len(sizes) < 2 else ["macro"] if len(set(sizes)) == 1 else ["macro", "micro"]


def _mean(key: ScoreKey, kind: str, parts: Sequence[Scores], single: Sequence[Contest]) -> Contest:
    total = sum(map(len, parts))
    weights = [1 / len(parts) if kind == "macro" else len(part) / total for part in parts]
    scores: list[Score | None] = [None] * len(single[0].scores)
    for place in parts[0].columns:
        scores[place] = _weighted({entry.key[0]: score for entry in single if (score := entry.scores[place])}, weights)
    tests = pair_tests([replace(part, weight=weight) for part, weight in zip(parts, weights, strict=True)])
    share = all(entry.share for entry in single)
    return Contest(key, parts[0].higher_is_better, share, total, scores, tests, kind)


def _weighted(scores: Mapping[str, Score], weights: Sequence[float]) -> Score:
    """The weighted mean of the parts' scores, with its interval."""
    held = [*scores.values()]
    value = exact_sum(weight * score.value for score, weight in zip(held, weights, strict=True))
    bounds = weighted_interval([s.value for s in held], [s.interval for s in held], weights)
    found = group_cautions({label: score.cautions for label, score in scores.items()})
    return Score(value, bounds, cautions=tuple(found if bounds is not None else ()))


def average_parts(parts_by_task: Mapping[str, Sequence[Scores]]) -> Iterator[Scores]:
    """Each task's first metric that is a share and better if higher: an average over tasks is the mean of these."""
    for parts in parts_by_task.values():
        for part in parts:
            if part.higher_is_better and all(0 <= v <= 1 for values in part.columns.values() for v in values):
                yield part
                break
