"""Perplexities over chosen documents: from each document's log-likelihood and its number of words or bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from evalengine.report.compare.comparability import document_change
from evalengine.report.numbers import exact_sum, same_number
from evalengine.report.read.run import Run, ScoreKey

Pairs = Sequence[tuple[float, float]]


def weighted_values(a: Run, b: Run, key: ScoreKey) -> tuple[tuple[float | None, float | None], int] | None:
    """((A's, B's value over the same documents), documents of both that were left out); values are None if there is no
    such document.

    The same: both runs have it, with equal content as far as their hashes tell, and with as many words or bytes. None
    if a run does not hold what its value is made of.
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


def perplexity(pairs: Pairs) -> float:
    """exp of minus the log-likelihood per word or byte (lm-eval's `weighted_perplexity`); infinite on overflow."""
    try:
        return math.exp(-_per_unit(pairs))
    except OverflowError:
        return math.inf


def bits_per_byte(pairs: Pairs) -> float:
    """Minus the log-likelihood per byte in bits (lm-eval's `bits_per_byte`)."""
    return -_per_unit(pairs) / math.log(2)


def _aggregation(metric: str) -> Callable[[Pairs], float]:
    return bits_per_byte if metric == "bits_per_byte" else perplexity


def _per_unit(pairs: Pairs) -> float:
    total = exact_sum(weight for _, weight in pairs)
    return exact_sum(value for value, _ in pairs) / total if total else math.nan


def _gives(aggregate: Callable[[Pairs], float], pairs: Mapping[int, tuple[float, float]], said: float) -> bool:
    value = aggregate([*pairs.values()])
    return same_number(value, said) or math.isclose(value, said, rel_tol=1e-9)


def _same_text(a: Run, b: Run, task: str, doc: int) -> bool:
    return document_change(a, b, task, doc) != "documents"
