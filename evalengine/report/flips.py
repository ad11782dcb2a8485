"""Documents whose answer or 0/1 score two runs do not share. No SciPy: every run's noise floor counts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from evalengine.report.comparability import document_differs
from evalengine.report.numbers import same_number
from evalengine.report.runs import Run

Cause = Literal["configuration", "data", "scorer", "numerics", "unknown"]


@dataclass(frozen=True)
class Flip:
    """One document whose answer or correctness differs under one filter."""

    task: str
    filter: str
    doc_id: int
    metric: str | None  # whose values follow: the first that differs, else the first there is
    answer_a: str | None
    answer_b: str | None
    value_a: float | None
    value_b: float | None
    cause: Cause


def flips(a: Run, b: Run, causes: Mapping[tuple[str, int], Cause]) -> Iterator[Flip]:
    """Documents whose answer or 0/1 score differs. causes: of the documents whose outputs differ or are not known; what
    changed the others is how they were scored.

    Answers made of log-likelihoods (choices) flip by score only, and so does a log-likelihood task's other metrics'
    noise stay out: it is the logprobs' own.
    """
    generated = {item.task for item in a.items.values() if item.kind == "generate_until"}
    for task, filter_name in sorted({(k[0], k[2]) for k in a.scores} | a.answers.keys()):
        metrics = sorted(k for k in a.scores.keys() & b.scores.keys() if (k[0], k[2]) == (task, filter_name))
        left, right = (run.answers.get((task, filter_name), {}) for run in (a, b))
        documents = (left.keys() & right.keys()).union(*(a.scores[k].keys() & b.scores[k].keys() for k in metrics))
        for doc in sorted(documents):
            values = [(k[1], a.scores[k].get(doc), b.scores[k].get(doc)) for k in metrics]
            changed = [v for v in values if _flipped(v[1], v[2], task in generated)]
            if changed or (task in generated and left.get(doc) != right.get(doc) and doc in left and doc in right):
                metric, value_a, value_b = [*changed, *values, (None, None, None)][0]
                answers = (left.get(doc), right.get(doc))
                cause = "data" if document_differs(a, b, task, doc) else causes.get((task, doc), "scorer")
                yield Flip(task, filter_name, doc, metric, *answers, value_a, value_b, cause)


def _flipped(old: float | None, new: float | None, any_number: bool) -> bool:
    if old is None or new is None or same_number(old, new):
        return False
    return any_number or {old, new} == {0.0, 1.0}
