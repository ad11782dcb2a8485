"""The metrics of two runs, and their paired statistics over what both runs score."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from evalengine.report.clusters import cluster_names
from evalengine.report.lm_eval_samples import ROLLING
from evalengine.report.runs import Key, Run, ScoreKey
from evalengine.report.statistics import PairedResult, paired

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class MetricDelta:
    """One metric: as each run reports it over everything it ran, and paired over what both runs score."""

    key: ScoreKey
    value_a: float | None
    value_b: float | None
    paired: PairedResult | None  # None where the runs hold no number by document or window
    left_out: int  # units without a finite score in both, which no statistic can take
    higher_is_better: bool | None  # None where neither run says
    unit: Literal["document", "window"] = "document"  # what is paired
    nats: bool = False  # a log-likelihood, which is no share of anything


def metric_deltas(a: Run, b: Run) -> list[MetricDelta]:
    """The metrics of either run's results; and of rolling tasks, whose perplexities have no number by document, the
    log-likelihoods that they are made of."""
    return [*(_metric(a, b, key) for key in sorted(a.results.keys() | b.results.keys())), *_rolling(a, b)]


def _metric(a: Run, b: Run, key: ScoreKey) -> MetricDelta:
    """Documents that the task's `cluster` column does not relate are each their own cluster."""
    better = a.higher_is_better.get(key, b.higher_is_better.get(key))
    left, right = a.scores.get(key, {}), b.scores.get(key, {})
    docs = [doc for doc in sorted(left.keys() & right.keys()) if _finite(left[doc], right[doc])]
    result = None
    if len(docs) > 1:
        clusters = cluster_names(a, b, key[0], docs)
        result = paired(*_columns(left, right, docs), clusters=clusters, higher_is_better=better is not False)
    values = [run.results.get(key, (None, None))[0] for run in (a, b)]
    return MetricDelta(key, values[0], values[1], result, len(left.keys() & right.keys()) - len(docs), better)


def _rolling(a: Run, b: Run) -> Iterator[MetricDelta]:
    """Windows of one document are related, so that documents are the clusters. Beside lm-eval's files, which hold one
    sum a document (`rolling.aligned`), the documents themselves are paired."""
    unit: Literal["document", "window"] = "document" if a.by_lm_eval or b.by_lm_eval else "window"
    for task in sorted({item.task for run in (a, b) for item in run.items.values() if item.kind == ROLLING}):
        left, right = (_sums(run, task) for run in (a, b))
        common = left.keys() & right.keys()
        keys = [key for key in sorted(common) if _finite(left[key], right[key]) and _same_tokens(a, b, key)]
        result = None
        if len(keys) > 1:
            documents = [key[1] for key in keys]
            clusters = cluster_names(a, b, task, documents) or documents
            result = paired(*_columns(left, right, keys), clusters=clusters)
        name = (task, f"loglikelihood per {unit}", "none")
        yield MetricDelta(name, _mean(left), _mean(right), result, len(common) - len(keys), True, unit, nats=True)


def _sums(run: Run, task: str) -> dict[Key, float]:
    return {
        key: math.nan if item.sum_logprob is None else item.sum_logprob
        for key, item in run.items.items()
        if item.task == task and item.kind == ROLLING
    }


def _same_tokens(a: Run, b: Run, key: Key) -> bool:
    """Whether a window scores the same tokens in both runs, as far as they tell; another context may cut it anew."""
    x, y = a.items[key].output_sha256, b.items[key].output_sha256
    return not x or not y or x == y


def _finite(x: float, y: float) -> bool:
    return math.isfinite(x) and math.isfinite(y)


def _mean(values: Mapping[Key, float]) -> float | None:
    """None where a value is unknown or has no mean."""
    if not values or not all(map(math.isfinite, values.values())):
        return None
    return math.fsum(values.values()) / len(values)


def _columns(left: Mapping[K, float], right: Mapping[K, float], keys: Sequence[K]) -> tuple[np.ndarray, np.ndarray]:
    x, y = (np.array([values[key] for key in keys], dtype=np.float64) for values in (left, right))
    return x, y
