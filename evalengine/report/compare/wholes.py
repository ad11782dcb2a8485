"""Metrics without a number by document, over the documents that two runs share: groups of tasks, and perplexities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evalengine.report.compare.comparability import document_change
from evalengine.report.numbers import exact_sum, same_value
from evalengine.report.read.groups import members
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import across_tasks, cluster_names
from evalengine.report.stats.mean_interval import scaled
from evalengine.report.stats.paired import PairedResult, paired
from evalengine.report.stats.perplexity import value_of

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


def weighted_values(a: Run, b: Run, key: ScoreKey) -> tuple[tuple[float | None, float | None], int] | None:
    """((A's, B's value over the same documents), shared documents that are left out); the values are None without such
    documents.

    Documents are the same if both runs have them, with equal content as far as their hashes tell, and with as many
    words or bytes. None if a run does not hold what its value is computed from.
    """
    left, right = a.weighted.get(key), b.weighted.get(key)
    if not left or not right:
        return None
    for pairs, run in ((left, a), (right, b)):
        value, reported = ratio_value(key[1], [*pairs.values()]), run.results[key][0]
        if not same_value(value, reported, 1e-9):
            return None
    shared = left.keys() & right.keys()
    docs = [doc for doc in sorted(shared) if left[doc][1] == right[doc][1] and _same_text(a, b, key[0], doc)]
    values = [ratio_value(key[1], [pairs[doc] for doc in docs]) if docs else None for pairs in (left, right)]
    return (values[0], values[1]), len(shared) - len(docs)


def ratio_value(metric: str, pairs: Sequence[tuple[float, float]]) -> float:
    """A perplexity or bits per byte (lm-eval's `weighted_perplexity`, `bits_per_byte`) of documents' (log-likelihood,
    number of words or bytes)."""
    units = exact_sum(weight for _, weight in pairs)
    nats = -exact_sum(value for value, _ in pairs) / units if units else math.nan
    return value_of(nats, "bits" if metric == "bits_per_byte" else "perplexity")


def _same_text(a: Run, b: Run, task: str, doc: int) -> bool:
    return document_change(a, b, task, doc) != "documents"
