"""The different answers of two runs, with both texts around the place: the grids of flipped answers and of outputs
that part; and the regressions (question, target, both answers and where they part), one below the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.item_differences import Divergence, Flip, shared_text
from evalengine.report.compare.report import regressions
from evalengine.report.html.markup import Node
from evalengine.report.html.page import Page
from evalengine.report.html.parts import Column, beginning, grid
from evalengine.report.numbers import counted, shown
from evalengine.report.read.names import document_name, item_name
from evalengine.report.read.run import Key, direction

TEXT_BYTES = 10_000_000  # most of all texts in UTF-8: packed, they then take below 15 MB of the file, however random
ITEM_BYTES = 12_000  # most of one item's texts
CELL = 160  # characters of a text that a row shows, at most
CELL_BYTES = 4_000_000  # most of all rows' texts
NONE = (None, None)  # texts that no run holds
CHANGE = Column("Change", "mark", "8ch", marks=("better", "worse"))
TIE = Column("Near-tie", "mark", "10ch", phone=False, marks=("possible", "no"))
CAUSE = Column("Cause", "text", "minmax(9ch, 18ch)", phone=False, choose=True)


def diverging(c: Comparison) -> list[tuple[Key, Divergence | None]]:
    """Requests whose outputs differ, in key order; None where a run holds no tokens to say where."""
    divergences = {divergence.key: divergence for divergence in c.divergences}
    outputs = {d.key for d in c.differences if "output" in d.kinds} | divergences.keys()
    return [(key, divergences.get(key)) for key in sorted(outputs)]


def outputs_grid(page: Page, c: Comparison) -> Node:
    """A row for each of `diverging`, in its order."""
    flips: dict[tuple[str, int], list[Flip]] = {}
    for flip in c.flips:
        flips.setdefault((flip.task, flip.doc_id), []).append(flip)
    causes = {difference.key: difference.cause for difference in c.differences}
    room, cell = _rooms(len(diverging(c)) + len(c.flips))
    items, cells = [], []
    for key, d in diverging(c):
        output, own = _output(c, key, d, room), flips.get(key[:2], [])
        items.append({**output, "flips": [_flip(flip, room) for flip in own], "question": _question(c, key[:2], room)})
        texts = [text if text is None else beginning(text, cell)[:CELL] or "(ends)" for text in output["texts"] or NONE]
        place = (None, None, None) if d is None else (d.position, d.gap, d.near_tie)
        cells.append([key[0], document_name(key), place[0], *texts, *place[1:], not own, causes[key]])
    columns = [
        *_item_columns(cells),
        Column("Token", "number", "7ch"),
        Column("Continuation A", "text", "minmax(5ch, 1.2fr)"),
        Column("Continuation B", "text", "minmax(5ch, 1.2fr)"),
        Column("Gap, nat", "number", "9ch", digits=4, phone=False),
        TIE,
        Column("Answer", "mark", "9ch", phone=False, marks=("unchanged", "changed")),
        CAUSE,
    ]
    return grid(page, "outputs", columns, cells, detail="output", items=items, noun="outputs")


def flips_grid(page: Page, c: Comparison) -> Node:
    """A row for each flip, which opens what `outputs_grid` holds of the document's first diverging output."""
    places: dict[tuple[str, int], tuple[int | None, Divergence | None]] = {}
    for row, (key, first) in enumerate(diverging(c)):
        places.setdefault(key[:2], (row, first))
    sums = _sums(c)
    room, cell = _rooms(len(places) + len(c.flips))
    items, cells = [], []
    for flip in c.flips:
        place, d = places.get((flip.task, flip.doc_id), (None, None))
        items.append({**_flip_item(c, flip, room), "output": place, "choices": sums.get((flip.task, flip.doc_id), [])})
        answers = [None if text is None else beginning(text, cell)[:CELL] for text in (flip.answer_a, flip.answer_b)]
        values = (flip.value_a, flip.value_b)
        score = None if None in values else " → ".join(shown(value, "g") for value in values if value is not None)
        at = (None, None) if d is None else (d.position, d.near_tie)
        texts = (flip.filter, flip.metric, *answers, score, _better(c, flip), flip.change, *at, flip.cause)
        cells.append([flip.task, str(flip.doc_id), *texts])
    columns = [
        *_item_columns(cells),
        Column("Filter", "text", "16ch", phone=False, choose=True, several=True),
        Column("Metric", "text", "12ch", phone=False, choose=True, several=True),
        Column("Answer A", "text", "minmax(6ch, 1fr)"),
        Column("Answer B", "text", "minmax(6ch, 1fr)"),
        Column("Score", "text", "11ch", phone=False),
        CHANGE,
        Column("What changed", "text", "15ch", phone=False, choose=True, several=True),
        Column("Token", "number", "7ch", phone=False),
        TIE,
        CAUSE,
    ]
    return grid(page, "flips", columns, cells, detail="flip", items=items, noun="flips")


def _rooms(count: int) -> tuple[int, int]:
    """Bytes for the texts of one item, and for one text in a row, where there are so many rows."""
    return min(ITEM_BYTES, TEXT_BYTES // max(1, count)), min(4 * CELL, CELL_BYTES // (2 * max(1, count)))


def _item_columns(cells: Sequence[Sequence[Any]]) -> tuple[Column, Column]:
    """The task's name, which may be cut, and the document's number, which is not."""
    width = f"{max(5, *(len(row[1]) + 1 for row in cells))}ch"
    return Column("Task", "text", "minmax(7ch, 1fr)", choose=True, several=True), Column("Doc", "text", width)


def _output(c: Comparison, key: Key, d: Divergence | None, room: int) -> dict[str, Any]:
    """Both texts around the place where they part; `texts` is None where a run holds none."""
    x, y = c.a.items[key].text, c.b.items[key].text
    have_texts = x is not None and y is not None
    x, y = (x or "", y or "") if have_texts else ("", "")
    at = shared_text(x, y)
    before = _end(x[:at], room // 4)
    after = [beginning(text[at:], room * 3 // 8) for text in (x, y)]
    item = {"name": item_name(key), "before": before, "cut_before": len(before) < at, "position": None, "gap": None}
    item["texts"] = after if have_texts else None
    item["cut"] = [at + len(shown_text) < len(text) for shown_text, text in zip(after, (x, y), strict=True)]
    if d is not None:
        item |= {"position": d.position, "gap": d.gap, "near_tie": d.near_tie, "ids": [d.tokens_a, d.tokens_b]}
        item["logprobs"] = [_number(d.logprob_a), _number(d.logprob_b)]
    return item


def _flip_item(c: Comparison, flip: Flip, room: int) -> dict[str, Any]:
    document = (flip.task, flip.doc_id)
    return {"name": item_name((*document, 0, 0)), "flip": _flip(flip, room), "question": _question(c, document, room)}


def _question(c: Comparison, document: tuple[str, int], room: int) -> list[str] | None:
    """[question, target] of a document; None where no run's files tell."""
    question = c.questions.get(document)
    return None if question is None else [_end(question.question, room // 4), beginning(question.target, room // 8)]


def _flip(flip: Flip, room: int) -> dict[str, Any]:
    texts = [None if text is None else beginning(text, room // 4) for text in (flip.answer_a, flip.answer_b)]
    about = {"filter": flip.filter, "metric": flip.metric, "cause": flip.cause, "change": flip.change}
    return {**about, "texts": texts, "scores": [_number(flip.value_a), _number(flip.value_b)]}


def _better(c: Comparison, flip: Flip) -> bool | None:
    """Whether the score got better; None where it did not change, or no direction is known."""
    old, new = _number(flip.value_a), _number(flip.value_b)
    higher = direction((c.a, c.b), (flip.task, flip.metric or "", flip.filter))
    if not isinstance(old, float) or not isinstance(new, float) or old == new or higher is None:
        return None
    return (new > old) == higher


def _sums(c: Comparison) -> dict[tuple[str, int], list[list[Any]]]:
    """[request, A's summed logprob, B's] by (task, document), of flipped documents whose requests score given texts."""
    flipped = {(flip.task, flip.doc_id) for flip in c.flips}
    sums: dict[tuple[str, int], list[list[Any]]] = {}
    for key, x in c.a.items.items():
        y = c.b.items.get(key)
        if y is not None and key[:2] in flipped and x.kind != "generate_until":
            sums.setdefault(key[:2], []).append([key[2], _number(x.sum_logprob), _number(y.sum_logprob)])
    return sums


def _number(value: float | None) -> float | str | None:
    """A number for the page: in words where JSON cannot hold it; None if it is not known."""
    return value if value is None or math.isfinite(value) else shown(value, "g")


def _end(text: str, room: int) -> str:
    return text[max(0, len(text) - (room if text.isascii() else room // 4)) :]


OPEN = 3  # shown unfolded
MOST = 200  # shown at all; the flips' table has the rest


def regressions_section(page: Page, c: Comparison, names: tuple[str, str] = ("A", "B")) -> None:
    """The section, before all others; none where nothing got worse. names: of A and B."""
    found = regressions(c)
    if not found:
        return
    better = c.answers.get("wrong to right", 0)
    note = f"{counted(len(found), 'document')} that {names[0]} answers right and {names[1]} wrong"
    note += f"; {better:,} went the other way." if better else "; none went the other way."
    if len(found) > MOST:
        note += f" The first {MOST:,}; the table of flips has them all."
    cards = []
    for number, one in enumerate(found[:MOST]):
        d = one.parts_at
        output = None if d is None else _output(c, d.key, d, ITEM_BYTES)
        card = {**_flip_item(c, one.flip, ITEM_BYTES), "output": output, "names": names, "open": number < OPEN}
        cards.append({"is": "card", **card})
    page.section("regressions", "Right to wrong", *cards, note=note)
