"""Aggregation and standard errors, against numpy and values worked out by hand."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalengine.harness.metrics import bits_per_byte, mean, mean_stderr, summarize, weighted_perplexity
from evalengine.tasks.base import Task

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60)


class Fake:
    """A task that has aggregations and nothing else."""

    def __init__(self, **aggregations: str) -> None:
        self._aggregations = aggregations

    def aggregation(self) -> dict[str, str]:
        return self._aggregations


def results(per_doc: list[dict[tuple[str, str], Any]], **aggregations: str) -> dict[str, float | str]:
    return summarize(cast(Task, Fake(**aggregations)), per_doc)


@given(SCORES)
def test_mean_and_its_standard_error(values: list[float]) -> None:
    assert mean(values) == pytest.approx(np.mean(values), rel=1e-12, abs=1e-8)
    expected = np.std(values, ddof=1) / math.sqrt(len(values))
    assert mean_stderr(values) == pytest.approx(expected, rel=1e-9, abs=1e-8)


@given(SCORES, st.randoms())
def test_order_does_not_change_a_bit(values: list[float], rng: Any) -> None:
    shuffled = rng.sample(values, len(values))
    assert mean(values).hex() == mean(shuffled).hex()
    assert mean_stderr(values).hex() == mean_stderr(shuffled).hex()


def test_a_plain_sum_would_depend_on_the_order() -> None:
    values = [0.1, 1e16, -1e16, 0.3]
    assert float(np.add.reduce(values)) != float(np.add.reduce(values[::-1]))
    assert mean(values) == mean(values[::-1]) == pytest.approx(0.1)


@given(st.integers(0, 400), st.integers(2, 400))
def test_accuracy_is_the_exact_ratio(right: int, total: int) -> None:
    right = min(right, total)
    scores = [1.0] * right + [0.0] * (total - right)
    p = right / total
    assert mean(scores) == p == sum(scores) / len(scores)
    assert mean_stderr(scores) == pytest.approx(math.sqrt(p * (1 - p) / (total - 1)), rel=1e-12, abs=1e-15)


def test_weighted_aggregations_by_hand() -> None:
    items = [(-2.0, 3), (-4.0, 1)]  # 6 nats over 4 words
    assert weighted_perplexity(items) == pytest.approx(math.exp(1.5))
    assert bits_per_byte(items) == pytest.approx(1.5 / math.log(2))
    assert weighted_perplexity([(0.0, 5)]) == 1.0
    assert weighted_perplexity([(-1e6, 1)]) == math.inf


def test_summary_keys_and_order() -> None:
    per_doc = [
        {("em", "strict"): 1.0, ("em", "flexible"): 1.0, ("ppl", "strict"): (-2.0, 2)},
        {("em", "strict"): 0.0, ("em", "flexible"): 1.0, ("ppl", "strict"): (-4.0, 1)},
    ]
    assert list(results(per_doc, em="mean", ppl="weighted_perplexity").items()) == [
        ("em,strict", 0.5),
        ("em_stderr,strict", 0.5),
        ("em,flexible", 1.0),
        ("em_stderr,flexible", 0.0),
        ("ppl,strict", pytest.approx(math.exp(2))),
        ("ppl_stderr,strict", "N/A"),
    ]


def test_one_document_has_no_standard_error() -> None:
    assert results([{("acc", "none"): 1.0}], acc="mean") == {"acc,none": 1.0, "acc_stderr,none": "N/A"}
