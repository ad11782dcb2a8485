"""The models document by document: which of them answered it right, and in its panel what each of them said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from evalengine.report.compare.flips import answer_of
from evalengine.report.html.markup import Markup
from evalengine.report.html.page import Page
from evalengine.report.html.parts import Column, beginning, grid
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.pairing import Shared
from evalengine.report.read.asked import Asked, asked_of
from evalengine.report.read.run import ScoreKey, direction

BYTES = 8_000_000  # most of all texts
ITEM_BYTES = 8_000  # most of one document's
CELL = 120  # characters of a question in a row
COLUMNS = 8  # models that have a column each; of more, the panel alone says how each answered


def documents_grid(page: Page, board: Board) -> Markup | None:
    """A row for each document that all models were asked; None where no metric has a number by document."""
    listed = [(task, key, shared) for task, shared in board.shared.items() for key in _key(board, task, shared)]
    count = sum(len(shared.rows) for _, _, shared in listed)
    if not count:
        return None
    room = min(ITEM_BYTES, BYTES // count)
    items, rows = [], []
    for task, key, shared in listed:
        first = shared.runs[0]
        asked = asked_of([board.runs[first]], {(task, doc) for doc in shared.documents(first)})
        for numbers in shared.rows:
            known = asked.get((task, numbers[0]))
            item, row = _document(board, key, dict(zip(shared.runs, numbers, strict=True)), known, room)
            items.append(item)
            rows.append([task, str(numbers[0]), *row])
    width = f"{max(5, max(len(row[1]) for row in rows) + 1)}ch"
    names = board.names if len(board.names) <= COLUMNS else []
    columns = [
        Column("Task", "text", "minmax(7ch, 12ch)", choose=True, phone=False),
        Column("Doc", "text", width),
        Column("Question", "text", "minmax(0, 2fr)"),
        Column("Right", "text", "9ch", choose=True),
        Column("Answers", "mark", "12ch", marks=("all alike", "they differ"), phone=False),
        *(Column(name, "mark", "minmax(7ch, 1fr)", phone=False, marks=("right", "wrong")) for name in names),
    ]
    page.blocks("documents", items)
    kept = [place for place in range(len(columns)) if place or len(listed) > 1]
    rows = [[row[place] for place in kept] for row in rows]
    drawn = [columns[place] for place in kept]
    return grid(page, "documents", drawn, rows, detail="document", blocks="documents", noun="documents")


def _key(board: Board, task: str, shared: Shared) -> Iterator[ScoreKey]:
    """The task's first metric that has a number for each shared document of every run; none where there is none."""
    for key in board.runs[shared.runs[0]].results if shared.rows else ():
        scores = {place: board.runs[place].scores.get(key, {}) for place in shared.runs}
        if key[0] == task and all(set(shared.documents(place)) <= own.keys() for place, own in scores.items()):
            yield key
            return


def _document(
    board: Board, key: ScoreKey, numbers: dict[int, int], asked: Asked | None, room: int
) -> tuple[dict[str, Any], list[Any]]:
    """What the panel shows of a document, and its cells after its number. numbers: the document's, by model's place."""
    higher = direction(board.runs, key) is not False
    share = room // (2 * max(1, len(numbers)))
    answers: list[list[Any]] = []
    marks: list[bool | None] = []
    said: list[str | None] = []
    for place, name in enumerate(board.names):
        value = board.runs[place].scores[key][numbers[place]] if place in numbers else None
        right = bool((value == 1.0) == higher) if value in (0.0, 1.0) else None
        answer = answer_of(board.runs[place], key, numbers[place]) if place in numbers else None
        finite = float(value) if value is not None and math.isfinite(value) else None
        answers.append([name, None if answer is None else beginning(answer, share), finite, right])
        marks.append(right)
        said.append(answer)
    known = [mark for mark in marks if mark is not None]
    counted = f"{sum(known)} of {len(known)}" if known else ""
    alike = len(set(said)) == 1 if None not in said else None
    question, target = ("", "") if asked is None else (asked.question, asked.target)
    item = {
        "name": f"{key[0]} doc {next(iter(numbers.values()))}",
        "asked": None if asked is None else [question[-(room // 4) :], beginning(target, room // 8)],
        "metric": key[1],
        "answers": answers,
    }
    preview = beginning(" ".join(question.split()), 4 * CELL)[:CELL]
    return item, [preview, counted, alike, *(marks if len(marks) <= COLUMNS else ())]
