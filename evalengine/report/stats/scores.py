"""Scores of several runs on the same documents, and the one place where pairs of runs are tested."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evalengine.report.numbers import LARGEST, mean, same_value
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import across_tasks, cluster_names
from evalengine.report.stats.loss_bound import Losses, joined
from evalengine.report.stats.metric_interval import scaled
from evalengine.report.stats.paired import PairedResult, paired, score_range
from evalengine.report.stats.perplexity import CLOSE

if TYPE_CHECKING:
    from evalengine.report.stats.pass_probability import Design


@dataclass(frozen=True)
class Scores:
    """One task's scores on the same documents, or windows of their texts, in several runs.

    Several of these are the parts of a mean over tasks, which are fixed: only documents, or clusters of them, are a
    random sample.
    """

    key: ScoreKey
    columns: Mapping[int, Sequence[float]]  # run -> [n]
    higher_is_better: bool | None  # None: not known
    clusters: Sequence[str] | None = None  # [n], where documents are related
    weight: float = 1.0  # in the mean

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def finite(self) -> bool:
        return all((np.abs(column) < LARGEST).all() for column in self.columns.values())

    @property
    def mean_of_two(self) -> tuple[float, float]:
        """The weighted means of runs 0 and 1."""
        first, second = (self.weight * mean(self.columns[run]) for run in (0, 1))
        return first, second


def is_mean(run: Run, key: ScoreKey) -> bool:
    """Whether a run's result is the mean of its documents' numbers, or is missing."""
    values = run.scores[key].values()
    return key not in run.results or same_value(mean(values), run.results[key][0], CLOSE, CLOSE)


def scores_of_pair(
    a: Run, b: Run, key: ScoreKey, documents: Iterable[int], higher_is_better: bool | None, weight: float = 1.0
) -> Scores:
    """The scores of two runs (0 and 1) on documents that both hold.

    Raises `ConfigError` if a run names the clusters of some of the documents only.
    """
    documents = sorted(documents)
    columns = {n: [run.scores[key][doc] for doc in documents] for n, run in enumerate((a, b))}
    return Scores(key, columns, higher_is_better, cluster_names(a, b, key[0], documents), weight)


def paired_scores(
    parts: Sequence[Scores],
    a: int = 0,
    b: int = 1,
    *,
    unbounded: bool = False,
    alpha: float = 0.05,
    power: float = 0.8,
    metrics: int = 1,
) -> PairedResult:
    """Compare run `b` with run `a` on the mean of the parts, all of one direction; the other arguments are `paired`'s.

    Raises `ValueError` for scores that are not finite.
    """
    weights = [part.weight for part in parts]
    x, y = (scaled([part.columns[run] for part in parts], weights) for run in (a, b))
    tasks, better = [(len(part.columns[a]), part.weight) for part in parts], parts[0].higher_is_better is not False
    return paired(
        x, y, clusters=_clusters(parts), higher_is_better=better, unbounded=unbounded, alpha=alpha, power=power,
        metrics=metrics, tasks=tasks,
    )  # fmt: skip


def loss_design(parts: Sequence[Scores], alpha: float) -> Design:
    """The losses of run 1 against run 0 on the mean of the parts, each in its own direction; `alpha` of a bound."""
    from evalengine.report.stats.pass_probability import Design  # which comparisons without a gate do not need

    tasks, scale, most = [], 0.0, 1.0
    for part, names in zip(parts, _names(parts), strict=True):
        x, y = (np.asarray(part.columns[run], dtype=np.float64) for run in (0, 1))
        tasks.append(Losses(x - y if part.higher_is_better else y - x, names, part.weight))
        own_scale, own_most = score_range(x, y)
        scale, most = max(scale, own_scale), max(most, own_most)
    return Design(tuple(joined(tasks)), scale, alpha, most)


def _clusters(parts: Sequence[Scores]) -> list[str] | None:
    """The clusters of all parts' documents, one part after the other; None where no documents are related."""
    if all(part.clusters is None for part in parts):
        return None
    return [str(name) for names in _names(parts) for name in names]


def _names(parts: Sequence[Scores]) -> list[Sequence[Hashable]]:
    """A name for each document's cluster, part by part. Parts of different tasks share a cluster only for items that
    the tasks share (`across_tasks`); parts of one task, its subjects, share the task's clusters."""
    if len(parts) == 1:
        return [range(len(parts[0])) if parts[0].clusters is None else parts[0].clusters]
    named = [part.clusters or [f"{place} {n}" for n in range(len(part))] for place, part in enumerate(parts)]
    return [across_tasks(part.key[0], names) for part, names in zip(parts, named, strict=True)]
