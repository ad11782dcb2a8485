"""An endpoint's own noise: what changes between identical requests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from evalengine.harness.journal import JournalEntry
from evalengine.records.lm_eval import TaskResult
from evalengine.report.stats.metric_interval import wilson


def noise(asks: Sequence[Mapping[Any, JournalEntry]], results: Sequence[Sequence[TaskResult]]) -> dict[str, Any]:
    """What `asks` of the same requests show, as plain JSON values. results: of each ask, the tasks' results with their
    samples.

    Of texts and of each metric: how many of all changed at least once, with Wilson's 95 % interval of that share; of a
    metric also the mean share that changes between two asks, and its value in each ask.
    """
    keys = [*asks[0]]
    changed = [key for key in keys if len({answers[key].text for answers in asks}) > 1]
    return {
        "asks": len(asks),
        "texts": _share(len(changed), len(keys)),
        "metrics": [entry for place in range(len(results[0])) for entry in _of_task([own[place] for own in results])],
    }


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
        changed = [doc for doc in documents if len({one[doc] for one in asked}) > 1]
        pairs = [sum(a[doc] != b[doc] for doc in documents) / len(documents) for a, b in combinations(asked, 2)]
        values = [math.fsum(one[doc] for doc in documents) / len(documents) for one in asked]
        entries.append({"task": results[0].name, "metric": metric, "filter": name, "values": values,
                        "documents_changed": changed, "between_two_asks": math.fsum(pairs) / len(pairs),
                        **_share(len(changed), len(documents))})  # fmt: skip
    return entries


def _share(changed: int, count: int) -> dict[str, Any]:
    return {"changed": changed, "of": count, "interval": list(wilson(changed, count))}


def noise_lines(found: Mapping[str, Any]) -> list[str]:
    """The noise in sentences."""
    texts = found["texts"]
    lines = [f"{found['asks']} identical asks: {texts['changed']} of {texts['of']} texts changed {_at(texts)}"]
    for one in found["metrics"]:
        low, high = min(one["values"]), max(one["values"])
        named = f"{one['task']} {one['metric']}, {one['filter']}"
        lines.append(
            f"{named}: {one['changed']} of {one['of']} scores changed {_at(one)}, "
            f"{100 * one['between_two_asks']:.2g} % between two asks; the value lies in {low:.4f} to {high:.4f}"
        )
    return lines


def _at(share: Mapping[str, Any]) -> str:
    low, high = share["interval"]
    return f"(95 %: {100 * low:.2g} to {100 * high:.2g} %)"
