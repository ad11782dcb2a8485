"""The texts of a run's documents: the prompt, its question without the examples before it, and the target; and of
given choices, as probabilities, which one was taken, how surely, and by what margin."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.numbers import in_range
from evalengine.report.read.lm_eval import continuations, newest, requests_of, target_index
from evalengine.report.read.run import Run, RunData

Document = tuple[str, int]  # task, doc_id
BINS = 10  # of confidence
SHORTEST = 40  # characters: a question is longer, or has a paragraph before it


@dataclass(frozen=True)
class Question:
    """One document, for people."""

    question: str  # the end of the prompt, without the examples before it
    target: str  # the right choice, or the target's last line


def questions_of(runs: Sequence[Run], documents: Collection[Document]) -> dict[Document, Question]:
    """The questions and targets of these documents, read again from the files of the first run that holds texts: a
    `Run` does not keep them. Empty where no run does (baselines), and without a look at the disk where there are no
    documents."""
    for run in runs if documents else ():
        if run.kind == "baseline":
            continue
        try:
            rows_by_task = newest(run.source)[1]
        except (ConfigError, OSError):
            continue
        rows = {(task, row["doc_id"]): row for task, rows in rows_by_task.items() for row in rows}
        found = [(key, rows[key]) for key in documents if key in rows]
        return {key: Question(_question(prompt_of(row)), target_of(row, continuations(row))) for key, row in found}
    return {}


def prompt_of(sample: Mapping[str, Any]) -> str:
    """The context of the first request; all requests of a sample share it, but for rolling ones, which score it."""
    return str(next(iter(requests_of(sample)), {}).get("arg_0", ""))


def target_of(sample: Mapping[str, Any], texts: Sequence[str]) -> str:
    """The right one of the choices `texts` with its number, else the target's last line: a worked solution ends with
    its answer."""
    place = target_index(sample, texts) if len(texts) > 1 else None
    if place is not None:
        return f"{place}: {texts[place].strip()}"
    lines = str(sample.get("target", "")).strip().splitlines()
    return lines[-1] if lines else ""


def _question(prompt: str) -> str:
    """The end of the prompt, from a paragraph's start on: the examples before it are left out, a bare "Answer:" is not
    all that is left."""
    paragraphs = prompt.strip().split("\n\n")
    at = len(paragraphs) - 1
    while at > 0 and len("\n\n".join(paragraphs[at:])) < SHORTEST:
        at -= 1
    return "\n\n".join(paragraphs[at:])


@dataclass(frozen=True)
class Choice:
    """One document's decision by summed log-likelihood (lm-eval's `acc`)."""

    doc_id: int
    chosen: int
    target: int | None  # None where the samples do not say which choice is right
    confidence: float  # the chosen one's softmax over the choices' summed log-likelihoods
    margin: float | None  # the target's log-likelihood less the best other's, nat; > 0 if it was chosen
    probability: float | None = None  # the target's softmax over the choices' summed log-likelihoods

    @property
    def correct(self) -> bool:
        return self.chosen == self.target


@dataclass(frozen=True)
class Bin:
    """Documents of similar confidence."""

    confidence: float  # the mean of the documents' confidences
    correct: int
    count: int


def choices(data: RunData, task: str) -> list[Choice]:
    """The documents of a multiple-choice task; empty for other tasks, and for a baseline. Documents without a finite
    likelihood are omitted: no probability follows from them."""
    if data.kinds.get(task) != "loglikelihood":
        return []
    taken = []
    for doc, rows in data.samples.get(task, {}).items():
        texts = continuations(rows[0])
        likelihoods = [item.sum_logprob for item in data.documents[task, doc] if item.repeat == 0][: len(texts)]
        if len(likelihoods) < 2 or any(value is None or not in_range(value) for value in likelihoods):
            continue
        sums, target = np.array(likelihoods, dtype=np.float64), target_index(rows[0], texts)
        chosen = int(np.argmax(sums))  # the first of equals, as in lm-eval
        weights = np.exp(sums - sums[chosen])
        margin = None if target is None else float(sums[target] - np.delete(sums, target).max())
        probability = None if target is None else float(weights[target] / weights.sum())
        taken.append(Choice(doc, chosen, target, float(1.0 / weights.sum()), margin, probability))
    return taken


def reliability(taken: Sequence[Choice]) -> list[Bin]:
    """Documents in equally wide bins of confidence; empty bins are left out."""
    with_target = [choice for choice in taken if choice.target is not None]
    places = [min(int(choice.confidence * BINS), BINS - 1) for choice in with_target]
    groups = [[c for c, place in zip(with_target, places, strict=True) if place == number] for number in range(BINS)]
    return [Bin(math.fsum(c.confidence for c in g) / len(g), sum(c.correct for c in g), len(g)) for g in groups if g]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean |share correct - mean confidence| over documents, by bins (Naeini, Cooper & Hauskrecht 2015, AAAI)."""
    total = sum(b.count for b in bins)
    return math.fsum(b.count / total * abs(b.correct / b.count - b.confidence) for b in bins)


def margins(taken: Sequence[Choice]) -> Iterator[float]:
    """The known margins, in nats."""
    return (choice.margin for choice in taken if choice.margin is not None)
