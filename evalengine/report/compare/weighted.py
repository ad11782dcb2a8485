"""Perplexities over chosen documents: from each document's log-likelihood and its number of words or bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from evalengine.report.compare.comparability import document_change
from evalengine.report.numbers import same_number
from evalengine.report.read.aggregates import Pairs, bits_per_byte, perplexity
from evalengine.report.read.run import Run, ScoreKey


def weighted_values(a: Run, b: Run, key: ScoreKey) -> tuple[tuple[float | None, float | None], int] | None:
    """((A's, B's value over the same documents), shared documents that are left out); the values are None without such
    documents.

    Documents are the same if both runs have them, with equal content as far as their hashes tell, and with as many
    words or bytes. None if a run does not hold what its value is computed from.
    """
    left, right = a.weighted.get(key), b.weighted.get(key)
    if not left or not right:
        return None
    aggregate = _aggregation(key[1])
    if not all(_gives(aggregate, pairs, run.results[key][0]) for pairs, run in ((left, a), (right, b))):
        return None
    shared = left.keys() & right.keys()
    docs = [doc for doc in sorted(shared) if left[doc][1] == right[doc][1] and _same_text(a, b, key[0], doc)]
    values = [aggregate([pairs[doc] for doc in docs]) if docs else None for pairs in (left, right)]
    return (values[0], values[1]), len(shared) - len(docs)


def _aggregation(metric: str) -> Callable[[Pairs], float]:
    return bits_per_byte if metric == "bits_per_byte" else perplexity


def _gives(aggregate: Callable[[Pairs], float], pairs: Mapping[int, tuple[float, float]], reported: float) -> bool:
    """Whether a run's documents give the value that it reports."""
    value = aggregate([*pairs.values()])
    return same_number(value, reported) or math.isclose(value, reported, rel_tol=1e-9)


def _same_text(a: Run, b: Run, task: str, doc: int) -> bool:
    return document_change(a, b, task, doc) != "documents"
