"""The distributions of a task's requests: lengths, endings, logprobs; calibration and margins of its choices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from evalengine.report.html.markup import Markup, join
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, figure, fold, row_of
from evalengine.report.html.plots import Series, bars, calibration, histogram, legend
from evalengine.report.numbers import counted
from evalengine.report.read.documents import Choice, choices, expected_calibration_error, margins, reliability
from evalengine.report.read.load import RunData
from evalengine.report.read.run import Item
from evalengine.report.stats.metric_interval import budget_of, wilson

BINS = 30
MANY = 4  # with more tasks, the plots of each are folded
WORDS = {"stop": "a stop string or end token", "length": "the length limit"}


def distributions_section(page: Page, data: RunData) -> None:
    """Lengths, endings, truncation and logprobs of every task; nothing for a run without tokens and texts."""
    drawn = {task: figures for task in data.tasks if (figures := list(_figures(data, task)))}
    if drawn:
        parts = [fold(_plots(task, len(figures)), row_of(*figures), alone=len(drawn) == 1)
                 for task, figures in drawn.items()]  # fmt: skip
        if len(parts) > MANY:
            parts = [details(f"The plots of {len(parts)} tasks", *parts)]
        page.section("distributions", "Lengths, endings and logprobs", *parts)


def likelihood_section(page: Page, data: RunData) -> None:
    """Calibration and margins of the multiple-choice tasks."""
    taken = {task: choices(data, task) for task in data.tasks}
    with_target = {task: [c for c in listed if c.target is not None] for task, listed in taken.items()}
    drawn = {task: row_of(_calibration(listed), _margins(listed)) for task, listed in with_target.items() if listed}
    if drawn:
        parts = [fold(_plots(task, 2), row, alone=len(drawn) == 1) for task, row in drawn.items()]
        if len(parts) > MANY:
            every = [choice for listed in with_target.values() for choice in listed]
            all_tasks = fold(f"All {len(parts)} tasks: 2 plots", row_of(_calibration(every), _margins(every)))
            parts = [all_tasks, details(f"The plots of {len(parts)} tasks", *parts)]
        note = (
            "Each choice's probability is the softmax of the choices' summed log-likelihoods; the likeliest is chosen."
        )
        page.section("likelihood", "Calibration and margins", *parts, note=note)


def _plots(task: str, count: int) -> str:
    return f"{task}: {counted(count, 'plot')}"


def edges(values: Sequence[float], whole: bool) -> list[float]:
    """The edges of at most `BINS` bins over one finite value or more; whole numbers have them halfway between."""
    low, high = min(values), max(values)
    if whole:
        width = math.ceil((high - low + 1) / BINS)
        count = math.ceil((high - low + 1) / width)
        return [low - 0.5 + width * i for i in range(count + 1)]
    pad = 0.5 if low == high else 0.0
    return [float(edge) for edge in np.linspace(low - pad, high + pad, BINS + 1)]


def _figures(data: RunData, task: str) -> Iterator[Markup]:
    items = [item for item in data.run.items.values() if item.task == task]
    generated = data.kinds.get(task) == "generate_until"
    if not items:
        return
    reasons = Counter(data.endings[item.key][0] for item in items if item.key in data.endings)
    if all(item.output_ids is not None for item in items):
        yield _lengths(data, items, generated)
    if drawn := _logprobs(data, task, items):
        yield drawn
    if prompts := [data.endings[item.key][1] for item in items if item.key in data.endings]:
        yield figure("Prompt length", _histogram(prompts, "tokens", True), _span(prompts, "tokens"))
    if data.endings:
        cut = sum(item.truncated > 0 for item in items)
        rows = [
            (f"ended by {WORDS.get(r, r)}", float(n), "bad" if r == "length" else "") for r, n in reasons.most_common()
        ]
        rows = rows if generated else [("scored", float(len(items)), "")]
        rows.append(("prompt cut from the left to fit", float(cut), "bad"))
        yield figure("Endings and truncation", bars(rows, len(items), "requests"), counted(len(items), "request"))


def _lengths(data: RunData, items: Sequence[Item], generated: bool) -> Markup:
    """Output lengths, with those that ran into the limit apart."""
    lengths = [len(item.output_ids or ()) for item in items]
    limited = [data.endings.get(item.key, ("",))[0] == "length" for item in items]
    at = edges(lengths, whole=True)
    layers, note = [Series("", _counts(lengths, at))], _span(lengths, "tokens")
    if generated and (budget := budget_of(data.run, items[0].task)) is not None:
        note += f", of {budget:,} allowed"
    if generated and any(limited):
        parts = [[n for n, full in zip(lengths, limited, strict=True) if full is which] for which in (False, True)]
        layers = [Series("ended", _counts(parts[0], at)), Series("at the length limit", _counts(parts[1], at), "bad")]
        note = join(note, ". ", legend(("ended", ""), ("at the length limit", "bad")))
    title = "Output length" if generated else "Scored tokens"
    return figure(title, histogram(at, layers, "tokens", "requests"), note)


def _logprobs(data: RunData, task: str, items: Sequence[Item]) -> Markup | None:
    """Mean logprob of a token, by request; right and wrong documents apart where a task has one request each."""
    if len({item.doc_id for item in items}) != len(items):  # choices, several a document, have plots of their own
        return None
    means = {i.doc_id: i.sum_logprob / len(i.output_ids) for i in items if i.output_ids and i.sum_logprob is not None}
    finite = {doc: value for doc, value in means.items() if math.isfinite(value)}
    key = next((key for key in data.score_keys(task) if data.binary(key)), None)
    if not finite:
        return None
    at = edges(list(finite.values()), whole=False)
    if key is None:
        layers, note = [Series("", _counts(finite.values(), at))], counted(len(finite), "request")
        return figure("Mean logprob of a token", histogram(at, layers, "nat", "requests"), note)
    scores = data.run.scores[key]
    right, wrong = ([v for doc, v in finite.items() if scores.get(doc) == which] for which in (1.0, 0.0))
    layers = [Series("correct", _counts(right, at)), Series("wrong", _counts(wrong, at), "bad")]
    marks = legend((f"correct by {key[1]}", ""), ("wrong", "bad"))
    return figure("Mean logprob of an output's tokens", histogram(at, layers, "nat", "requests"), marks)


def _calibration(taken: Sequence[Choice]) -> Markup:
    bins = reliability(taken)
    points = [(b.confidence, b.correct / b.count, *wilson(b.correct, b.count), b.count) for b in bins]
    error = expected_calibration_error(bins)
    note = f"Calibration error {error:.3f} over {len(taken):,} documents; lines are 95 % intervals."
    return figure("Calibration", calibration(points), note)


def _margins(taken: Sequence[Choice]) -> Markup:
    values = list(margins(taken))
    at = edges(values, whole=False)
    right = [c.margin for c in taken if c.correct and c.margin is not None]
    wrong = [c.margin for c in taken if not c.correct and c.margin is not None]
    layers = [Series("correct", _counts(right, at)), Series("wrong", _counts(wrong, at), "bad")]
    title = "Margin: target's log-likelihood less the best other's"
    close = sum(abs(value) < 1 for value in values)
    note = join(f"{close:,} of {len(values):,} within 1 nat. ", legend(("correct", ""), ("wrong", "bad")))
    return figure(title, histogram(at, layers, "nat", "documents", rule=0.0 if at[0] < 0 < at[-1] else None), note)


def _histogram(values: Sequence[float], unit: str, whole: bool) -> Markup:
    at = edges(values, whole)
    return histogram(at, [Series("", _counts(values, at))], unit, "requests")


def _counts(values: Iterable[float], at: Sequence[float]) -> list[float]:
    return [float(n) for n in np.histogram(np.fromiter(values, dtype=np.float64), bins=np.asarray(at))[0]]


def _span(values: Sequence[int], unit: str) -> str:
    middle = float(np.median(np.asarray(values)))
    return f"median {f'{middle:,.1f}'.removesuffix('.0')}, from {min(values):,} to {max(values):,} {unit}"
