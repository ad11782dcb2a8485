"""An endpoint's own noise: what changes between identical requests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

from evalengine.harness.journal import JournalEntry
from evalengine.records.lm_eval import TaskResult
from evalengine.report.stats.metric_interval import mean_interval, wilson


def noise(asks: Sequence[Mapping[Any, JournalEntry]], results: Sequence[Sequence[TaskResult]]) -> dict[str, Any]:
    """What `asks` of the same requests show, as plain JSON values. results: of each ask, the tasks' results with their
    samples.

    Of texts and of each metric: which of all changed at least once, their share with Wilson's 95 % interval, and
    `between`; of a metric also its value in each ask.
    """
    keys = [*asks[0]]
    texts = [[answers[key].text for answers in asks] for key in keys]
    changed = [list(key) for key, own in zip(keys, texts, strict=True) if len(set(own)) > 1]
    documents = [f"{task}/{document}" for task, document, *_ in keys]
    return {
        "asks": len(asks),
        "texts": {"requests_changed": changed, **_share(len(changed), len(keys)), **between(texts, documents)},
        "metrics": [entry for place in range(len(results[0])) for entry in _of_task([own[place] for own in results])],
    }


def between(asked: Sequence[Sequence[Hashable]], documents: Sequence[str] | None = None) -> dict[str, Any]:
    """The chance that two identical asks of a request differ: the mean over requests of the share of its pairs of asks
    that do, which estimates it without bias, with the 95 % interval of such a mean (`mean_interval`).

    asked: of each request, what came of every ask. documents: each request's, where a document has several.
    """
    shares = [fmean(one != other for one, other in combinations(own, 2)) for own in asked]
    bounds = mean_interval(shares, clusters=documents)
    return {"between_two_asks": fmean(shares), "between_interval": None if bounds is None else list(bounds)}


def _of_task(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """One task's metrics."""
    scores: dict[tuple[str, str], list[dict[int, float]]] = defaultdict(lambda: [{} for _ in results])
    for ask, result in enumerate(results):
        for sample in result.samples:
            for metric, value in sample.metrics.items():
                if isinstance(value, int | float):
                    scores[metric, sample.filter][ask][sample.doc_id] = float(value)
    entries = []
    for (metric, name), asked in scores.items():
        documents = [doc for doc in asked[0] if all(doc in one for one in asked)]
        if not documents:
            continue
        scored = [[one[doc] for one in asked] for doc in documents]
        changed = [doc for doc, own in zip(documents, scored, strict=True) if len(set(own)) > 1]
        values = [math.fsum(one[doc] for doc in documents) / len(documents) for one in asked]
        entries.append({"task": results[0].name, "metric": metric, "filter": name, "values": values,
                        "documents_changed": changed, **_share(len(changed), len(documents)),
                        **between(scored)})  # fmt: skip
    return entries


def _share(changed: int, count: int) -> dict[str, Any]:
    return {"changed": changed, "of": count, "interval": list(wilson(changed, count))}


def noise_lines(found: Mapping[str, Any]) -> list[str]:
    """The noise in sentences."""
    texts = found["texts"]
    changed = f"{texts['changed']} of {texts['of']} texts changed {_at(texts['interval'])}"
    lines = [f"{found['asks']} identical asks: {changed}; {_between(texts)}"]
    for one in found["metrics"]:
        low, high = min(one["values"]), max(one["values"])
        named = f"{one['task']} {one['metric']}, {one['filter']}"
        lines.append(
            f"{named}: {one['changed']} of {one['of']} scores changed {_at(one['interval'])}; {_between(one)}; "
            f"the value lies in {low:.4f} to {high:.4f}"
        )
    return lines


def _between(share: Mapping[str, Any]) -> str:
    return f"two asks differ in {100 * share['between_two_asks']:.2g} % {_at(share['between_interval'])}".rstrip()


def _at(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"(95 %: {100 * interval[0]:.2g} to {100 * interval[1]:.2g} %)"
