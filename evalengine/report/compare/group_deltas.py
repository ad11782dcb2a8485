"""A group of tasks as one metric of two runs: the documents of all its tasks in pairs."""

from __future__ import annotations

import numpy as np

from evalengine.report.numbers import exact_sum
from evalengine.report.read.groups import members
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import across_tasks, cluster_names
from evalengine.report.stats.paired import PairedResult, paired
from evalengine.report.stats.weighted_mean import scaled

Means = tuple[float, float]


def group_pairs(a: Run, b: Run, key: ScoreKey, higher_is_better: bool) -> tuple[PairedResult, Means] | None:
    """The statistics of a group's mean over the documents that both runs score, and that mean in A and in B.

    The tasks are fixed and keep their weights: only documents, or clusters of them, are a random sample. None where a
    run's mean is not one of its tasks' documents (`members`), a task is not in both, or a score is not finite.
    """
    left, right = members(a, key), members(b, key)
    if not left or [part for part, _ in left] != [part for part, _ in right]:
        return None
    columns: tuple[list[list[float]], list[list[float]]] = ([], [])
    clusters: list[str] = []
    for part, _ in left:
        documents = sorted(a.scores[part].keys() & b.scores[part].keys())
        if not documents:
            return None
        for column, run in zip(columns, (a, b), strict=True):
            column.append([run.scores[part][doc] for doc in documents])
        names = cluster_names(a, b, part[0], documents) or [str(doc) for doc in documents]
        clusters += across_tasks(part[0], names)
    weights = [weight for _, weight in left]
    x, y = (np.array(scaled(column, weights), dtype=np.float64) for column in columns)
    if len(x) < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    result = paired(x, y, clusters=clusters, higher_is_better=higher_is_better)
    return result, (exact_sum(x) / len(x), exact_sum(y) / len(y))
