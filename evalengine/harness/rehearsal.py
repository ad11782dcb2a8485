"""Rehearses a run's end before its first request: every document is scored and written, with made-up answers.

A row that a task cannot score, or that no file can hold, would otherwise cost the whole run, and each resumed one; so
would a scorer that asks for what the machine lacks. Many look no further at an empty text (IFEval's checks), so that a
generated answer is a text, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from evalengine.errors import ConfigError, first_of, listed, one_line
from evalengine.harness.metrics import WEIGHTED, summarize
from evalengine.tasks.base import Task
from evalengine.tasks.instance import MADE_UP, Instance, Response
from evalengine.tasks.metric import MetricKey, MetricValue

SHOWN = 10  # problems of one task that are listed


def rehearse(task: Task, instances: Sequence[Sequence[Instance]]) -> None:
    """Raises ConfigError that names the documents which could not be scored or written.

    instances: the requests of each document.
    """
    values, failed = [], dict[str, list[int]]()  # what was raised -> the documents
    for doc_id, requests in enumerate(instances):
        try:
            values.append(_scored(task, doc_id, list(requests)))
        except Exception as error:  # the task's own code may raise anything
            failed.setdefault(one_line(error), []).append(doc_id)
    problems = [
        f"tasks.{task.name}: document {listed([*map(str, documents)], 1)} cannot be scored or written ({reason})"
        for reason, documents in failed.items()
    ]
    if not problems:
        problems.extend(f"tasks.{task.name}: {problem}" for problem in _totals(task, values))
    if problems:
        raise ConfigError(first_of(problems, SHOWN, "more reasons"))
    try:
        summarize(task, values, bootstrap_iterations=1000)
    except Exception as error:  # the task's own aggregation may raise anything
        raise ConfigError(f"tasks.{task.name}: its documents' scores cannot be added up ({one_line(error)})") from error


def _scored(task: Task, doc_id: int, requests: list[Instance]) -> dict[MetricKey, MetricValue]:
    """The scores of a made-up answer, after those of an empty one, which must exist as well."""
    doc, target = task.docs[doc_id], task.target(task.docs[doc_id])
    values = task.process_results(doc, [Response() for _ in requests])
    if any(request.kind == "generate_until" for request in requests):
        values = task.process_results(doc, [Response(text=MADE_UP) for _ in requests])
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
