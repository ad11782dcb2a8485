"""Why a metric has no interval, or one that may be too narrow, in terms of what the metric is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from evalengine.report.read.lm_eval_samples import ROLLING
from evalengine.report.read.run import ScoreKey
from evalengine.report.read.run_data import RunData
from evalengine.report.stats.metric_interval import interval_cautions


def interval_note(data: RunData, has_interval_by_key: Mapping[ScoreKey, bool], about: str) -> str:
    """The note under the metrics.

    has_interval_by_key: whether each metric has an interval. about: how the intervals were made.
    """
    reasons: dict[str, list[ScoreKey]] = {}
    for key, has_interval in has_interval_by_key.items():
        if not has_interval:
            reasons.setdefault(_why(data, key), []).append(key)
    parts = [about] if any(has_interval_by_key.values()) else []
    for key in [key for key, has_interval in has_interval_by_key.items() if has_interval]:
        parts += [f"{next(_named([key], data))}: {why}." for why in interval_cautions(data.run, key)]
    parts += [f"No interval for {', '.join(_named(keys, data))}: {why}." for why, keys in reasons.items()]
    return " ".join(parts)


def _why(data: RunData, key: ScoreKey) -> str:
    documents, scores = len(data.samples.get(key[0], {})), list(data.run.scores.get(key, {}).values())
    if key[0] not in data.samples:
        return "it is made of several tasks' results"
    if documents < 2:
        return "one document says nothing of others"
    if not scores and data.kinds.get(key[0]) == ROLLING:
        if key in data.run.weighted:
            return "its documents do not differ in it"
        return "the run does not record what each document adds to it"
    if not scores:
        return "it is no mean of numbers that the documents have"
    if not all(map(math.isfinite, scores)):
        return "a document's number is NaN or infinite"
    if len(set(scores)) == 1:
        return "all documents have the same number"
    return "it is no mean of the documents' numbers"


def _named(keys: Sequence[ScoreKey], data: RunData) -> Iterator[str]:
    for task, metric, _ in dict.fromkeys((k[0], k[1], "") for k in keys):
        yield f"{task} {metric}" if len(data.tasks) > 1 else metric
