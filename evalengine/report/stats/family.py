"""Which metrics are one test: a task that samples its answers reports `exact_match` and `avg@8`, the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.paired import holm

Name = TypeVar("Name")


def one_test(keys: Iterable[ScoreKey], runs: Sequence[Run]) -> dict[ScoreKey, ScoreKey]:
    """Each metric's representative: the first of its task and filter that gives every document of every run the same
    value. Metrics without a value per document represent themselves."""
    first: dict[tuple[object, ...], ScoreKey] = {}
    found = {}
    for key in keys:
        columns = tuple(tuple(sorted(run.scores.get(key, {}).items())) for run in runs)
        found[key] = first.setdefault((key[0], key[2], columns), key) if all(columns) else key
    return found


def family_p(p_values: Mapping[Name, float], same: Mapping[Any, Any]) -> dict[Name, float]:
    """The p-values after Holm's correction, in which metrics of one representative (`one_test`) are one test."""
    tests = [name for name in p_values if same.get(name, name) == name or same[name] not in p_values]
    adjusted = dict(zip(tests, holm([p_values[name] for name in tests]), strict=True))
    return {name: adjusted[name] if name in adjusted else adjusted[same[name]] for name in p_values}
