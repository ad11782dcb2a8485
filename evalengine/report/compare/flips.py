"""Documents that two runs answered or scored differently.

An answer is the filtered text, or the choice that a metric took (`choices_of`), whether right or wrong. Where another
wrong choice wins, the answer changes and the score does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from evalengine.report.numbers import same_number
from evalengine.report.read.run import Run, ScoreKey, direction

SCORER = "scorer"  # the cause of another answer or score for equal outputs
Change = Literal["right to wrong", "wrong to right", "score", "wrong to wrong", "right to right", "answer"]
CHANGES: dict[Change, str] = {  # changes of the score first; a document with several changes counts under the first
    "right to wrong": "from right to wrong",
    "wrong to right": "from wrong to right",
    "score": "by another score than from 0 to 1 or back",
    "wrong to wrong": "from one wrong answer to another",
    "right to right": "from one right answer to another",
    "answer": "at an equal score",
}
OF_ANSWER: tuple[Change, ...] = ("wrong to wrong", "right to right", "answer")  # the score did not change


@dataclass(frozen=True)
class Flip:
    """One document whose answer or score differs under one filter; for choices, under one filter and metric."""

    task: str
    filter: str
    doc_id: int
    metric: str | None  # the metric of the values below: the first that differs, else the first
    answer_a: str | None
    answer_b: str | None
    value_a: float | None
    value_b: float | None
    cause: str
    change: Change
    choice_a: int | None = None  # number of the choice taken, from 0; None: a generated text, or not known
    choice_b: int | None = None


def flips(a: Run, b: Run, causes: Mapping[tuple[str, int], str]) -> Iterator[Flip]:
    """Documents whose answer or 0/1 score differs. causes: for documents whose outputs differ or are not known; the
    cause for the others is `SCORER`.

    A log-likelihood that serves as a score is no answer: its noise is that of the logprobs.
    """
    generated = {item.task for item in a.items.values() if item.kind == "generate_until"}
    shared = (a.scores.keys() & b.scores.keys()) | (a.choices.keys() & b.choices.keys())
    places = {(key[0], key[2]) for key in shared} | (a.answers.keys() & b.answers.keys())
    for task, name in sorted(places):
        keys = sorted(key for key in shared if (key[0], key[2]) == (task, name))
        if task in generated:
            yield from _of_texts(a, b, (task, name), keys, causes)
        else:
            for key in keys:
                yield from _of_choices(a, b, key, causes)


def tally(flips: Iterable[Flip]) -> dict[ScoreKey, dict[Change, int]]:
    """How many documents changed in which way, by (task, metric, filter)."""
    counts: dict[ScoreKey, Counter[Change]] = {}
    for flip in flips:
        counts.setdefault((flip.task, flip.metric or "", flip.filter), Counter())[flip.change] += 1
    return {key: {change: count[change] for change in CHANGES if count[change]} for key, count in counts.items()}


def changed_documents(flips: Iterable[Flip]) -> dict[Change, int]:
    """How many documents changed in which way, each counted once: a changed score before a changed answer."""
    order = list(CHANGES)
    first: dict[tuple[str, int], Change] = {}
    for flip in flips:
        place = (flip.task, flip.doc_id)
        first[place] = min(flip.change, first.get(place, flip.change), key=order.index)
    counts = Counter(first.values())
    return {change: counts[change] for change in CHANGES if counts[change]}


def score_unchanged(flips: Iterable[Flip]) -> str:
    """How many documents changed their answer alone, `3 from one wrong answer to another`; "" if there are none."""
    counts = changed_documents(flips)
    return ", ".join(f"{counts[change]:,} {CHANGES[change]}" for change in OF_ANSWER if change in counts)


def _of_texts(
    a: Run, b: Run, place: tuple[str, str], keys: list[ScoreKey], causes: Mapping[tuple[str, int], str]
) -> Iterator[Flip]:
    """Flips of generated answers, where all metrics of a filter share one text."""
    task, name = place
    left, right = (run.answers.get(place, {}) for run in (a, b))
    documents = (left.keys() & right.keys()).union(*(_scored(a, key) & _scored(b, key) for key in keys))
    for doc in sorted(documents):
        values = [(key, a.scores.get(key, {}).get(doc), b.scores.get(key, {}).get(doc)) for key in keys]
        changed = [v for v in values if v[1] is not None and v[2] is not None and not same_number(v[1], v[2])]
        if changed or (doc in left and doc in right and left[doc] != right[doc]):
            key, old, new = [*changed, *values, (None, None, None)][0]
            yield Flip(
                *(task, name, doc, key[1] if key else None, left.get(doc), right.get(doc), old, new),
                cause=causes.get((task, doc), SCORER),
                change=_change(old, new, direction((a, b), key) if key else None),
            )


def _of_choices(a: Run, b: Run, key: ScoreKey, causes: Mapping[tuple[str, int], str]) -> Iterator[Flip]:
    """Flips of scored answers, where every metric has its own choice; an unknown choice is judged by the 0/1 score."""
    task, metric, name = key
    left, right = a.choices.get(key, {}), b.choices.get(key, {})
    for doc in sorted((left.keys() & right.keys()) | (_scored(a, key) & _scored(b, key))):
        old, new = (run.scores.get(key, {}).get(doc) for run in (a, b))
        choices = left.get(doc), right.get(doc)
        if (None not in choices and choices[0] != choices[1]) or {old, new} == {0.0, 1.0}:
            yield Flip(
                *(task, name, doc, metric, answer_of(a, key, doc), answer_of(b, key, doc), old, new),
                cause=causes.get((task, doc), SCORER),
                change=_change(old, new, direction((a, b), key)),
                choice_a=choices[0],
                choice_b=choices[1],
            )


def changed_answers(a: Run, b: Run, key: ScoreKey, documents: Iterable[tuple[int, int]]) -> int | None:
    """How many documents (their numbers in A and in B) have another answer under a metric, right or wrong; None where a
    run does not hold its answers."""
    pairs = [(answer_of(a, key, x), answer_of(b, key, y)) for x, y in documents]
    known = [(old, new) for old, new in pairs if old is not None and new is not None]
    return sum(old != new for old, new in known) if known else None


def _scored(run: Run, key: ScoreKey) -> set[int]:
    return set(run.scores.get(key, {}))


def answer_of(run: Run, key: ScoreKey, doc: int) -> str | None:
    """A document's answer under a metric, for people: the filtered text, or the number of the choice that this metric
    took, with its text where the source has it. None where the source does not tell."""
    task, metric, name = key
    choice, likeliest = run.choices.get(key, {}).get(doc), run.answers.get((task, name), {}).get(doc)
    if choice is None:
        return None if metric in ("acc_norm", "acc_bytes", "acc_mutual_info") else likeliest
    texts = run.choice_texts.get(task, {}).get(doc, ())
    if choice < len(texts):
        return f"{choice}: {texts[choice].strip()}"
    return likeliest if likeliest is not None and likeliest.startswith(f"{choice}: ") else str(choice)


def _change(old: float | None, new: float | None, higher_is_better: bool | None) -> Change:
    if old is None or new is None:
        return "answer"
    if higher_is_better is None or not {old, new} <= {0.0, 1.0}:
        return "answer" if same_number(old, new) else "score"
    was, now = ((value == 1.0) == higher_is_better for value in (old, new))
    if was:
        return "right to right" if now else "right to wrong"
    return "wrong to right" if now else "wrong to wrong"
