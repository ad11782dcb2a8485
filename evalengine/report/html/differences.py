"""What two runs answered differently, with both texts around the place: the grids of flipped answers and of outputs
that part; and the regressions (question, target, both answers and where they part), one below the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from evalengine.report.compare.compare import Comparison, ItemDifference
from evalengine.report.compare.item_differences import Divergence, Flip, shared_text
from evalengine.report.compare.report import Regression, regressions
from evalengine.report.html.markup import Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import Column, beginning, chosen, grid
from evalengine.report.numbers import counted, shown
from evalengine.report.read.names import document_name, item_name
from evalengine.report.read.run import Key, direction

TEXT_BYTES = 10_000_000  # most of all texts in UTF-8: packed, they then take below 15 MB of the file, however random
ITEM_BYTES = 12_000  # most of one item's texts
CELL = 160  # characters of a text that a row shows, at most
CELL_BYTES = 4_000_000  # most of all rows' texts
CHANGE = Column("Change", "mark", "8ch", marks=("better", "worse"))
TIE = Column("Near-tie", "mark", "10ch", phone=False, marks=("possible", "no"))
CAUSE = Column("Cause", "text", "minmax(9ch, 18ch)", phone=False, choose=True)


def parting(c: Comparison) -> list[tuple[Key, Divergence | None]]:
    """Requests whose outputs differ, in key order; None where a run holds no tokens to say where."""
    divergences = {divergence.key: divergence for divergence in c.divergences}
    outputs = {d.key for d in c.differences if "output" in d.kinds} | divergences.keys()
    return [(key, divergences.get(key)) for key in sorted(outputs)]


def outputs_grid(page: Page, c: Comparison) -> Markup:
    """A row for each of `parting`, in its order."""
    rows, items = parting(c), []
    flips: dict[tuple[str, int], list[Flip]] = {}
    for flip in c.flips:
        flips.setdefault((flip.task, flip.doc_id), []).append(flip)
    causes = {difference.key: difference for difference in c.differences}
    room, cell = _rooms(len(rows) + len(c.flips))
    cells = []
    for key, divergence in rows:
        item = _output(c, key, divergence, room)
        item["flips"] = [_flip(flip, room) for flip in flips.get(key[:2], ())]
        item["asked"] = _asked(c, key[:2], room)
        items.append(item)
        cells.append([key[0], document_name(key), *_output_cells(item, causes[key], cell)])
    columns = [
        *_item_columns(cells),
        Column("Token", "number", "7ch"),
        Column("Goes on in A", "text", "minmax(5ch, 1.2fr)"),
        Column("Goes on in B", "text", "minmax(5ch, 1.2fr)"),
        Column("Gap, nat", "number", "9ch", digits=4, phone=False),
        TIE,
        Column("Answer", "mark", "9ch", phone=False, marks=("kept", "flipped")),
        CAUSE,
    ]
    return grid(page, "outputs", *_telling(columns, cells), detail="output", items=items, noun="outputs")


def flips_grid(page: Page, c: Comparison) -> Markup:
    """A row for each flip, which opens what `outputs_grid` holds of the document's first output that parts."""
    nowhere: tuple[int | None, Divergence | None] = (None, None)
    places: dict[tuple[str, int], tuple[int | None, Divergence | None]] = {}
    for row, (key, first) in enumerate(parting(c)):
        places.setdefault(key[:2], (row, first))
    sums = _sums(c)
    room, cell = _rooms(len(places) + len(c.flips))
    items, cells = [], []
    for flip in c.flips:
        document = (flip.task, flip.doc_id)
        place, divergence = places.get(document, nowhere)
        item = {"name": item_name((*document, 0, 0)), "flip": _flip(flip, room), "output": place}
        items.append({**item, "choices": sums.get(document, []), "asked": _asked(c, document, room)})
        cells.append([flip.task, str(flip.doc_id), *_flip_cells(c, flip, divergence, cell)])
    columns = [
        *_item_columns(cells),
        Column("Filter", "text", "16ch", phone=False, choose=True),
        Column("Metric", "text", "12ch", phone=False, choose=True),
        Column("Answer A", "text", "minmax(6ch, 1fr)"),
        Column("Answer B", "text", "minmax(6ch, 1fr)"),
        Column("Score", "text", "11ch", phone=False),
        CHANGE,
        Column("What changed", "text", "15ch", phone=False, choose=True),
        Column("Token", "number", "7ch", phone=False),
        TIE,
        CAUSE,
    ]
    return grid(page, "flips", *_telling(columns, cells), detail="flip", items=items, noun="flips")


def _rooms(count: int) -> tuple[int, int]:
    """Bytes for the texts of one item, and for one text in a row, where there are so many rows."""
    return min(ITEM_BYTES, TEXT_BYTES // max(1, count)), min(4 * CELL, CELL_BYTES // (2 * max(1, count)))


def _item_columns(cells: Sequence[Sequence[Any]]) -> tuple[Column, Column]:
    """The task's name, which may be cut, and the document's number, which is not."""
    longest = max((len(row[1]) for row in cells), default=0)
    return Column("Task", "text", "minmax(7ch, 1fr)", choose=True), Column("Doc", "text", f"{max(5, longest + 1)}ch")


def _asked(c: Comparison, document: tuple[str, int], room: int) -> list[str] | None:
    """[question, target] of a document; None where no run's files tell."""
    asked = c.asked.get(document)
    return None if asked is None else [_end(asked.question, room // 4), beginning(asked.target, room // 8)]


def _telling(columns: list[Column], rows: list[list[Any]]) -> tuple[list[Column], list[list[Any]]]:
    """Columns and rows without the columns that say nothing: tokens of scored choices, one task or filter for all."""
    values = {column.title: {row[i] for row in rows} for i, column in enumerate(columns)}
    silent = {title for title, cells in values.items() if cells == {None}}
    silent |= {title for title in ("Task", "Filter", "Metric", "What changed") if len(values.get(title, ())) == 1}
    return chosen(columns, rows, [i for i, column in enumerate(columns) if column.title not in silent])


def document_texts(c: Comparison, key: Key, room: int) -> tuple[str, str, str]:
    """(the end of the text that two outputs share, how A goes on, how B does), each of `room` bytes at most."""
    x, y = (run.items[key].text or "" for run in (c.a, c.b))
    at = shared_text(x, y)
    return _end(x[:at], room), beginning(x[at:], room), beginning(y[at:], room)


def _output(c: Comparison, key: Key, divergence: Divergence | None, room: int) -> dict[str, Any]:
    """Both texts around the place where they part; `a` and `b` are None where a run holds no text."""
    x, y, d = c.a.items[key].text, c.b.items[key].text, divergence
    have_texts = x is not None and y is not None
    x, y = (x, y) if x is not None and y is not None else ("", "")
    at = shared_text(x, y)
    before, a, b = _end(x[:at], room // 4), beginning(x[at:], room * 3 // 8), beginning(y[at:], room * 3 // 8)
    return {
        "name": item_name(key),
        "position": None if d is None else d.position,
        "before": before,
        "a": a if have_texts else None,
        "b": b if have_texts else None,
        "cut_before": len(before) < at,
        "cut_a": at + len(a) < len(x),
        "cut_b": at + len(b) < len(y),
        "ids_a": None if d is None else d.tokens_a,
        "ids_b": None if d is None else d.tokens_b,
        "logprob_a": None if d is None else _number(d.logprob_a),
        "logprob_b": None if d is None else _number(d.logprob_b),
        "gap": None if d is None else d.gap,
        "near_tie": None if d is None else d.near_tie,
    }


def _output_cells(item: dict[str, Any], difference: ItemDifference, cell: int) -> list[Any]:
    texts = [None if item[side] is None else (beginning(item[side], cell)[:CELL] or "(ends)") for side in ("a", "b")]
    return [item["position"], *texts, item["gap"], item["near_tie"], not item["flips"], difference.cause]


def _flip_cells(c: Comparison, flip: Flip, divergence: Divergence | None, cell: int) -> list[Any]:
    old, new = finite(flip.value_a), finite(flip.value_b)
    key = (flip.task, flip.metric or "", flip.filter)
    higher = direction((c.a, c.b), key)
    changed = old is not None and new is not None and old != new and higher is not None
    better = (new > old) == higher if changed and old is not None and new is not None else None
    values = (flip.value_a, flip.value_b)
    score = " → ".join(shown(value, "g") for value in values if value is not None) if None not in values else None
    answers = [None if text is None else beginning(text, cell)[:CELL] for text in (flip.answer_a, flip.answer_b)]
    place = (None, None) if divergence is None else (divergence.position, divergence.near_tie)
    return [flip.filter, flip.metric, *answers, score, better, flip.change, *place, flip.cause]


def _flip(flip: Flip, room: int) -> dict[str, Any]:
    answers = [None if text is None else beginning(text, room // 4) for text in (flip.answer_a, flip.answer_b)]
    return {
        "filter": flip.filter,
        "cause": flip.cause,
        "change": flip.change,
        "a": answers[0],
        "b": answers[1],
        "metric": flip.metric,
        "score_a": finite(flip.value_a),
        "score_b": finite(flip.value_b),
    }


def _sums(c: Comparison) -> dict[tuple[str, int], list[list[Any]]]:
    """[request, A's summed logprob, B's] by (task, document), of flipped documents whose requests score given texts."""
    flipped = {(flip.task, flip.doc_id) for flip in c.flips}
    sums: dict[tuple[str, int], list[list[Any]]] = {}
    for key, x in c.a.items.items():
        y = c.b.items.get(key)
        if y is not None and key[:2] in flipped and x.kind != "generate_until":
            sums.setdefault(key[:2], []).append([key[2], _number(x.sum_logprob), _number(y.sum_logprob)])
    return sums


def finite(value: float | None) -> float | None:
    """The value; None where JSON cannot hold it."""
    return value if value is not None and abs(value) < float("inf") else None


def _number(value: float | None) -> float | str | None:
    """A logprob for the page: in words where JSON cannot hold it; None if it is not known."""
    return value if value is None or math.isfinite(value) else shown(value, "g")


def _end(text: str, room: int) -> str:
    return text[max(0, len(text) - (room if text.isascii() else room // 4)) :]


OPEN = 3  # shown unfolded
MOST = 200  # shown at all; the flips' table has the rest
ROOM = 1500  # characters of a question, or of a text around the place where outputs part


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
    cards = [_card(c, one, number < OPEN, names) for number, one in enumerate(found[:MOST])]
    page.section("regressions", "Right to wrong", *cards, note=note)


def _card(c: Comparison, one: Regression, opened: bool, names: tuple[str, str]) -> Markup:
    flip = one.flip
    answers = [_or_none(text) for text in (flip.answer_a, flip.answer_b)]
    summary = join(tag("strong", one.name), tag("span", f"{answers[0][:60]} \u2192 {answers[1][:60]}", class_="gist"))
    return tag("details", tag("summary", summary), *_body(c, one, names), class_="card", open=opened)


def _body(c: Comparison, one: Regression, names: tuple[str, str]) -> Iterator[Markup]:
    flip = one.flip
    if one.asked is not None:
        yield tag("h3", "Question")
        yield tag("pre", one.asked.question[-ROOM:])
        yield tag("h3", "Target")
        yield tag("pre", tag("mark", one.asked.target[:ROOM], class_="right"))
    yield tag(
        "h3", " ".join(part for part in ("Answers under", flip.metric, flip.filter) if part not in (None, "none"))
    )
    yield _pair(names, tag("mark", _or_none(flip.answer_a)[:ROOM], class_="right"),
                tag("mark", _or_none(flip.answer_b)[:ROOM], class_="wrong"))  # fmt: skip
    if one.parts_at is not None:
        yield tag("h3", _place(one.parts_at))
        before, a, b = document_texts(c, one.parts_at.key, ROOM)
        yield _pair(names, join(tag("span", before, class_="soft"), tag("mark", a or "(ends)")),
                    join(tag("span", before, class_="soft"), tag("mark", b or "(ends)", class_="bad")))  # fmt: skip
    yield tag("p", f"Cause: {flip.cause}.", class_="note")


def _place(d: Divergence) -> str:
    gap = "" if d.gap is None else f", gap {shown(d.gap, '+.4f')} nat"
    tie = {True: ": a near-tie is possible", False: ": no near-tie", None: ""}[d.near_tie]
    return f"Token {d.position}, where the outputs part{gap}{tie}"


def _pair(names: tuple[str, str], a: Markup, b: Markup) -> Markup:
    sides = (
        tag("div", tag("p", side, class_="badge"), tag("pre", text)) for side, text in zip(names, (a, b), strict=True)
    )
    return tag("div", *sides, class_="pair")


def _or_none(answer: str | None) -> str:
    return "no answer" if answer is None else answer
