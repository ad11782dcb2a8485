"""The distributions of a task's requests: lengths, endings, logprobs; calibration and margins of its choices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, figure, fold, row_of
from evalengine.report.numbers import counted
from evalengine.report.read.documents import Choice, choices, expected_calibration_error, margins, reliability
from evalengine.report.read.run import Item, RunData
from evalengine.report.stats.metric_interval import budget_of, wilson

BINS = 30
MANY = 4  # with more tasks, the plots of each are folded
WORDS = {"stop": "a stop string or end token", "length": "the length limit"}


def distributions_section(page: Page, data: RunData) -> None:
    """Lengths, endings, truncation and logprobs of every task; nothing for a run without tokens and texts."""
    drawn = {task: figures for task in data.tasks if (figures := list(_figures(data, task)))}
    _section(page, "distributions", "Lengths, endings and logprobs", drawn)


def likelihood_section(page: Page, data: RunData) -> None:
    """Calibration and margins of the multiple-choice tasks."""
    taken = {task: [c for c in choices(data, task) if c.target is not None] for task in data.tasks}
    drawn = {task: [_calibration(own), _margins(own)] for task, own in taken.items() if own}
    every = [choice for own in taken.values() for choice in own]
    together = [_calibration(every), _margins(every)] if len(drawn) > MANY else []
    note = "Each choice's probability is the softmax of the choices' summed log-likelihoods; the likeliest is chosen."
    _section(page, "likelihood", "Calibration and margins", drawn, note, together)


def _section(
    page: Page, name: str, title: str, drawn: Mapping[str, list[Node]], note: Node = None, together: Sequence[Node] = ()
) -> None:
    """Each task's plots, folded where there are many tasks. together: the plots of all tasks as one."""
    rows = [fold(f"{task}: {counted(len(plots), 'plot')}", row_of(*plots), alone=len(drawn) == 1)
            for task, plots in drawn.items()]  # fmt: skip
    if len(rows) > MANY:
        whole = [fold(f"All {len(rows)} tasks: {len(together)} plots", row_of(*together))] if together else []
        rows = [*whole, details(f"The plots of {len(rows)} tasks", *rows)]
    if rows:
        page.section(name, title, *rows, note=note)


def edges(values: Sequence[float], whole: bool) -> list[float]:
    """The edges of at most `BINS` bins over one finite value or more; whole numbers have them halfway between."""
    low, high = min(values), max(values)
    if whole:
        width = math.ceil((high - low + 1) / BINS)
        count = math.ceil((high - low + 1) / width)
        return [low - 0.5 + width * i for i in range(count + 1)]
    pad = max(0.5, 1e-6 * abs(low)) if low == high else 0.0  # 0.5 is lost next to -1e38
    return [float(edge) for edge in np.linspace(low - pad, high + pad, BINS + 1)]


def _figures(data: RunData, task: str) -> Iterator[Node]:
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
        yield histogram("Prompt length", {"": prompts}, "tokens", _span(prompts))
    if data.endings:
        rows = [(f"ended by {WORDS.get(r, r)}", n, "bad" if r == "length" else "") for r, n in reasons.most_common()]
        rows = rows if generated else [("scored", len(items), "")]
        rows.append(("prompt cut from the left to fit", sum(item.truncated > 0 for item in items), "bad"))
        bars = {"is": "bars", "rows": rows, "total": len(items)}
        yield figure("Endings and truncation", bars, counted(len(items), "request"))


def _lengths(data: RunData, items: Sequence[Item], generated: bool) -> Node:
    """Output lengths, with those that ran into the limit apart."""
    layers: dict[str, list[float]] = {"ended": [], "at the length limit": []}
    for item in items:
        limited = generated and data.endings.get(item.key, ("",))[0] == "length"
        layers["at the length limit" if limited else "ended"].append(len(item.output_ids or ()))
    note = _span([n for own in layers.values() for n in own])
    if generated and (budget := budget_of(data.run, items[0].task)) is not None:
        note += f", of {budget:,} allowed"
    title = "Output length" if generated else "Scored tokens"
    return histogram(title, layers, "tokens", note)


def _logprobs(data: RunData, task: str, items: Sequence[Item]) -> Node:
    """Mean logprob of a token, by request; right and wrong documents apart where a task has one request each."""
    if len({item.doc_id for item in items}) != len(items):  # choices, several a document, have their own plots
        return None
    means = {i.doc_id: i.sum_logprob / len(i.output_ids) for i in items if i.output_ids and i.sum_logprob is not None}
    finite = {doc: value for doc, value in means.items() if math.isfinite(value)}
    key = next((key for key in data.score_keys(task) if data.binary(key)), None)
    if not finite:
        return None
    if key is None:
        return histogram("Mean logprob of a token", {"": [*finite.values()]}, "nat", counted(len(finite), "request"))
    scores = data.run.scores[key]
    right, wrong = ([v for doc, v in finite.items() if scores.get(doc) == which] for which in (1.0, 0.0))
    layers = {f"correct by {key[1]}": right, "wrong": wrong}
    return histogram("Mean logprob of an output's tokens", layers, "nat")


def _calibration(taken: Sequence[Choice]) -> Node:
    bins = reliability(taken)
    points = [(b.confidence, b.correct / b.count, *wilson(b.correct, b.count), b.count) for b in bins]
    error = expected_calibration_error(bins)
    note = f"Calibration error {error:.3f} over {len(taken):,} documents; lines are 95 % intervals."
    return figure("Calibration", {"is": "calibration", "points": points}, note)


def _margins(taken: Sequence[Choice]) -> Node:
    close = sum(abs(value) < 1 for value in margins(taken))
    layers = {name: [c.margin for c in taken if c.correct == good and c.margin is not None]
              for name, good in (("correct", True), ("wrong", False))}  # fmt: skip
    note = f"{close:,} of {sum(map(len, layers.values())):,} within 1 nat."
    return histogram("Margin: target's log-likelihood less the best other's", layers, "nat", note, noun="documents")


def histogram(
    title: str, layers: Mapping[str, Sequence[float]], unit: str, note: str = "", noun: str = "requests"
) -> Node:
    """The figure of one finite value or more, in layers by name. A second layer is of what went wrong; the legend
    leaves empty ones out. A rule is drawn at 0 between negative and positive logprobs."""
    values = [value for own in layers.values() for value in own]
    whole = all(isinstance(value, int) for value in values)
    at = edges(values, whole)
    named: list[dict[str, Any]] = []
    for name, own in layers.items():
        counts = np.histogram(np.asarray(own, dtype=np.float64), bins=np.asarray(at))[0]
        named.append({"name": name, "counts": counts.tolist(), "style": "bad" if named else ""})
    marks = [tag("span", tag("i", class_=layer["style"]), layer["name"]) for layer in named if any(layer["counts"])]
    legend = tag("span", *marks, class_="legend") if len(marks) > 1 else None
    rule = 0 if not whole and at[0] < 0 < at[-1] else None
    drawing = {"is": "histogram", "edges": at, "layers": named, "x": unit, "noun": noun, "rule": rule}
    return figure(title, drawing, [note, " ", legend])


def _span(values: Sequence[float]) -> str:
    middle = float(np.median(np.asarray(values)))
    return f"median {f'{middle:,.1f}'.removesuffix('.0')}, from {min(values):,} to {max(values):,} tokens"
