"""Rehearses a run's end before its first request: every document is scored and written once, with empty answers.

A row that a task cannot score, or that no file can hold, would otherwise cost the whole run, and each resumed one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from evalengine.errors import ConfigError, first_of
from evalengine.harness.metrics import WEIGHTED, summarize
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Instance, Response
from evalengine.tasks.metric import MetricKey, MetricValue

SHOWN = 10  # problems of one task that are listed


def rehearse(task: Task, instances: Sequence[Sequence[Instance]]) -> None:
    """Raises ConfigError that names the documents which could not be scored or written.

    instances: the requests of each document.
    """
    values, problems = [], []
    for doc_id, requests in enumerate(instances):
        try:
            values.append(_scored(task, doc_id, list(requests)))
        except Exception as error:  # the task's own code may raise anything
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
            problems.append(f"tasks.{task.name}: document {doc_id} cannot be scored or written ({reason})")
    if not problems:
        problems.extend(f"tasks.{task.name}: {problem}" for problem in _totals(task, values))
    if problems:
        raise ConfigError(first_of(problems, SHOWN, "more documents"))
    try:
        summarize(task, values, bootstrap_iterations=1000)
    except Exception as error:  # the task's own aggregation may raise anything
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        raise ConfigError(f"tasks.{task.name}: its documents' scores cannot be added up ({reason})") from error


def _scored(task: Task, doc_id: int, requests: list[Instance]) -> dict[MetricKey, MetricValue]:
    doc, target = task.docs[doc_id], task.target(task.docs[doc_id])
    values = task.process_results(doc, [Response() for _ in requests])
    json.dumps([doc, str(target)], ensure_ascii=False, default=str).encode("utf-8")
    return values


def _totals(task: Task, values: Sequence[dict[MetricKey, MetricValue]]) -> Iterator[str]:
    """Yields a sentence if metrics would divide by zero."""
    aggregations = task.aggregation()
    weighted = [key for key in values[0] if aggregations.get(key[0]) in WEIGHTED]
    weights = {key: [v[key][1] for v in values if key in v] for key in weighted}
    if empty := sorted({metric for (metric, _), sizes in weights.items() if sizes and sum(sizes) == 0}):
        yield (
            f"the {len(values)} evaluated documents are empty, and {', '.join(empty)} would divide by their words or "
            "bytes: give documents with text, or raise limit"
        )
