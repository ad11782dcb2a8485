"""Multiple-choice documents seen as probabilities: what was chosen, how surely, and by what margin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalengine.report.run_data import RunData


@dataclass(frozen=True)
class Choice:
    """One document's decision by summed log-likelihood (lm-eval's `acc`)."""

    doc_id: int
    chosen: int
    target: int | None  # None where the samples do not say which choice is right
    confidence: float  # softmax over the choices' summed log-likelihoods, of the chosen one
    margin: float | None  # the target's log-likelihood less the best other's, nat; > 0 if it was chosen

    @property
    def correct(self) -> bool:
        return self.chosen == self.target


@dataclass(frozen=True)
class Bin:
    """Documents of similar confidence."""

    confidence: float  # mean
    correct: int
    count: int


def choices(data: RunData, task: str) -> list[Choice]:
    """The documents of a multiple-choice task; empty for other tasks. Documents without a finite likelihood are left
    out: no probability follows from them."""
    if data.kinds.get(task) != "loglikelihood":
        return []
    found = []
    for doc, rows in data.samples[task].items():
        row, items = rows[0], data.documents[task, doc]
        texts = continuations(row)
        sums = [item.sum_logprob for item in items if item.repeat == 0][: len(texts)]
        if len(sums) < 2 or any(value is None or not math.isfinite(value) for value in sums):
            continue
        found.append(_choice(doc, np.array(sums, dtype=np.float64), target_index(row, texts)))
    return found


def continuations(row: Mapping[str, Any]) -> list[str]:
    """The text of each choice of a sample; those without their context (acc_mutual_info's second half) left out."""
    arguments = row.get("arguments")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    texts = [str(value.get("arg_1", "")) for value in arguments.values() if isinstance(value, Mapping)]
    return texts[: len(texts) // 2] if "acc_mutual_info" in row["metrics"] else texts


def target_index(row: Mapping[str, Any], texts: Sequence[str]) -> int | None:
    """Which choice is right: the target is its number, or its text. None where it could be either (choices that are
    numbers themselves): lm-eval's files do not say which."""
    target = str(row.get("target", "")).strip()
    found = {place for place, text in enumerate(texts) if text.strip() == target}
    if target.isascii() and target.isdigit() and int(target) < len(texts):
        found.add(int(target))
    return found.pop() if len(found) == 1 else None


def reliability(found: Sequence[Choice], bins: int = 10) -> list[Bin]:
    """Documents in equally wide bins of confidence, empty ones left out."""
    known = [choice for choice in found if choice.target is not None]
    places = [min(int(choice.confidence * bins), bins - 1) for choice in known]
    groups = [[c for c, place in zip(known, places, strict=True) if place == number] for number in range(bins)]
    return [Bin(math.fsum(c.confidence for c in g) / len(g), sum(c.correct for c in g), len(g)) for g in groups if g]


def expected_calibration_error(found: Sequence[Bin]) -> float:
    """Mean |share correct - mean confidence| over documents, by bins (Naeini, Cooper & Hauskrecht 2015, AAAI)."""
    total = sum(b.count for b in found)
    return math.fsum(b.count / total * abs(b.correct / b.count - b.confidence) for b in found)


def _choice(doc: int, sums: np.ndarray, target: int | None) -> Choice:
    chosen = int(np.argmax(sums))  # the first of equals, as lm-eval's
    weights = np.exp(sums - sums[chosen])
    margin = None if target is None else float(sums[target] - np.delete(sums, target).max())
    return Choice(doc, chosen, target, float(1.0 / weights.sum()), margin)


def margins(found: Sequence[Choice]) -> Iterator[float]:
    """The known margins, in nats."""
    return (choice.margin for choice in found if choice.margin is not None)
