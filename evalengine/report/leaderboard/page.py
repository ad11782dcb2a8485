"""Different models on the same tasks as a page: who leads and whether that is chance, metric by metric; and document by
document which of them answered it right, and in its panel what each of them said."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evalengine.records.evidence import PAGE
from evalengine.report.compare.item_differences import answer_of
from evalengine.report.html import parts
from evalengine.report.html.differences import regressions_section
from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.leaderboard import sheets
from evalengine.report.leaderboard.board import Contest
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.formats import board_json
from evalengine.report.leaderboard.history import curves, history_picture, history_plot, is_history
from evalengine.report.leaderboard.means import Group
from evalengine.report.leaderboard.pairing import Shared
from evalengine.report.leaderboard.sheets import both_names, headline, number, regressed, signed
from evalengine.report.numbers import counted, p_value
from evalengine.report.read.documents import Question, questions_of
from evalengine.report.read.names import SWEEP_FORMAT
from evalengine.report.read.run import ScoreKey, direction
from evalengine.report.sweep.write import VERSION, write_picture_and_list

LEAST = 3  # models from which on pairs are many
OPEN = 6  # metrics shown in full; further ones are folded
PARTS = 12  # a group of at most so many parts is shown unfolded
TILES = 3  # metrics in the first figures
NAMED = 3  # models of a tie that they name
HISTORY = (
    "Whiskers: each value's own 95 % interval. Band: the change since the first checkpoint, in pairs on the same "
    "documents; where it leaves the dashed line, the change is more than chance explains, each taken alone."
)
MATRIX = (
    "Row minus column, Holm's p, and how many answers differ, right or wrong; on the diagonal the value. Green: the "
    "row is better by a significant test; red: it is worse."
)
DOCUMENTS = (
    "Which models answered each document right, by each task's first metric. A row opens what each of them said."
)


def tests_matrix(board: Board, contest: Contest) -> Node:
    """Values on the diagonal; elsewhere row minus column, Holm's p, and how many answers differ."""
    tests = {(test.b, test.a): test for test in contest.tests}

    def cell(row: int, column: int) -> Node:
        if row == column:
            return parts.cell("", number(contest, contest.scores[row - 1]) or "·")
        test = tests.get((row, column)) or tests.get((column, row))
        if test is None:
            return parts.cell("refused", "not tested")
        sign = 1 if test.b == row else -1
        changed = None if test.changed is None else f"{test.changed:,} answers differ"
        wins = contest.wins(test)
        better = None if wins is None or not test.significant else wins == (sign == 1)
        difference = signed(sign * test.result.difference, contest.share and not test.nats)
        look = {True: "same", False: "other", None: "plain"}[better]
        return parts.cell(look, difference, f"p {p_value(test.p_adjusted)}", changed)

    return parts.matrix(board.names, cell)


def leaderboard_page(board: Board, history: bool = False, page_folder: Path | None = None) -> Page:
    """The comparison of models as a page. history: show the curves even where the models name no steps. page_folder:
    the page's folder, for links to the models' runs."""
    page = Page(_title(board), eyebrow="Models compared", scripts=("comparison.js", "models.js"))
    outcome = f"{sheets.verdict(board)}." if board.family else ""  # else the headline says that nothing was tested
    page.lead(parts.verdict(f"{headline(board)}.", outcome, None), parts.tiles(_figures(board)))
    page.section("metrics", "Metrics", *_metrics(board))
    if (pair := regressed(board)) is not None:
        regressions_section(page, pair, both_names(board))
    if (history or is_history(board)) and (drawn := curves(board)):
        plots = parts.row_of(*(tag("figure", history_plot(board, contest)) for contest in drawn))
        page.section("history", "History", plots, note=HISTORY)
    if board.groups:
        page.section("groups", "Groups and subjects", *(_group(board, group) for group in board.groups))
    if board.family:
        page.section("tests", "Paired tests", *_tests(board), note=MATRIX if len(board.runs) >= LEAST else None)
    if (documents := documents_grid(page, board)) is not None:
        page.section("documents", "Documents", documents, note=DOCUMENTS)
    if board.notes:
        page.section("notes", "Notes", parts.listed(board.notes))
    page.section("models", "Models", parts.facts(_models(board, page_folder)))
    return page


def _title(board: Board) -> str:
    tasks = list(dict.fromkeys(contest.key[0] for contest in board.contests)) + [group.name for group in board.groups]
    tasks_text = ", ".join(tasks) if 0 < len(tasks) <= 3 else counted(len(tasks), "task")
    return f"{len(board.runs)} models on {tasks_text}"


def _figures(board: Board) -> Iterator[tuple[str, Node, Node]]:
    for contest in board.tested[:TILES]:
        if contest.first:
            names = ", ".join(board.names[place] for place in contest.first[:NAMED])
            more = f" and {len(contest.first) - NAMED} more" if len(contest.first) > NAMED else ""
            tied = f"{len(contest.first)} tied for first"
            best = tied if contest.leader is None else sheets.value_with_unit(contest, contest.scores[contest.leader])
            yield contest.name, best, names + more
    yield "Models", f"{len(board.runs)}", None
    if board.family:
        of_tests = f"of {counted(board.family, 'test')}, at {sheets.PERCENT}"
        yield "Significant differences", f"{board.significant:,}", of_tests


def _metrics(board: Board) -> Iterator[Node]:
    shown = [_contest(board, contest) for contest in board.tested]
    yield from shown[:OPEN]
    if rest := shown[OPEN:]:
        yield parts.details(counted(len(rest), "more metric"), *rest)


def _contest(board: Board, contest: Contest) -> list[Node]:
    """A metric's ranking: who leads, who is tied, and each value with its interval."""
    ranking = sheets.scores_sheet(board, [contest]).without("Metric", "Documents")
    title = tag("h3", f"{sheets.titled(contest)} · {counted(contest.documents, 'document')}")
    return [title, parts.sheet_table(ranking)]


def _group(board: Board, group: Group) -> Node:
    sheet = sheets.group_sheet(board, group)
    note = tag("p", sheet.note, class_="note")
    return parts.details(sheet.title, parts.sheet_table(sheet), note, open=len(group.parts) <= PARTS)


def _tests(board: Board) -> Iterator[Node]:
    for contest in board.tested:
        if not contest.tests:
            continue
        pairs = parts.sheet_table(sheets.tests_sheet(board, [contest]).without("Metric"))
        nats = " (in nats a document where tested so)" if any(test.nats for test in contest.tests) else ""
        yield tag("h3", f"{sheets.titled(contest)}{'; differences in points' if contest.share else ''}{nats}")
        if len(board.runs) < LEAST:
            yield pairs
        else:
            yield tests_matrix(board, contest)
            yield parts.details(f"All {counted(len(contest.tests), 'pair')}, with intervals", pairs)


def _models(board: Board, page_folder: Path | None) -> Iterator[tuple[str, Node]]:
    for place, (run, name) in enumerate(zip(board.runs, board.names, strict=True)):
        step = f"step {board.steps[place]:,}, " if board.steps is not None else ""
        digest = tag("code", run.digest or "no digest", class_="under")
        target = run.folder / PAGE
        link: Node = run.source.name
        if page_folder is not None and target.is_file():
            link = tag("a", link, href=f"./{quote(os.path.relpath(target, page_folder))}")
        yield name, [step, link, digest, parts.origin_line(run)]


def write_history(board: Board, name: str, folder: Path) -> list[Path]:
    """Writes the three files, each whole or not at all, the list last: it makes the folder a finished experiment's.

    Raises `EvalEngineError` if the disk refuses.
    """
    page = folder / f"{name}.html"
    leaderboard_page(board, history=True, page_folder=folder).write(page)
    content = board_json(board)
    runs = [{**model, "source": os.path.relpath(model["source"], folder)} for model in content.pop("models")]
    listed = {**content, "format": SWEEP_FORMAT, "version": VERSION, "experiment": name, "runs": runs}
    return [page, *write_picture_and_list(name, folder, history_picture(board), listed)]


BYTES = 8_000_000  # most of all texts
ITEM_BYTES = 8_000  # most of one document's
CELL = 120  # characters of a question in a row
MODEL_COLUMNS = 8  # models that have a column each; of more, the panel alone says how each answered


def documents_grid(page: Page, board: Board) -> Node | None:
    """A row for each document that all models answered; None where no metric has a number by document."""
    listed = [(task, key, shared) for task, shared in board.shared.items() for key in _key(board, task, shared)]
    count = sum(len(shared.rows) for _, _, shared in listed)
    if not count:
        return None
    room = min(ITEM_BYTES, BYTES // count)
    items, rows = [], []
    for task, key, shared in listed:
        first = shared.runs[0]
        questions = questions_of([board.runs[first]], {(task, doc) for doc in shared.documents(first)})
        for numbers in shared.rows:
            known = questions.get((task, numbers[0]))
            item, row = _document(board, key, dict(zip(shared.runs, numbers, strict=True)), known, room)
            items.append(item)
            rows.append([task, str(numbers[0]), *row])
    width = f"{max(5, max(len(row[1]) for row in rows) + 1)}ch"
    names = board.names if len(board.names) <= MODEL_COLUMNS else []
    columns = [
        parts.Column("Task", "text", "minmax(7ch, 12ch)", choose=True, phone=False, several=True),
        parts.Column("Doc", "text", width),
        parts.Column("Question", "text", "minmax(0, 2fr)"),
        parts.Column("Right", "text", "9ch", choose=True),
        parts.Column("Answers", "mark", "12ch", marks=("all alike", "they differ"), phone=False),
        *(parts.Column(name, "mark", "minmax(7ch, 1fr)", phone=False, marks=("right", "wrong")) for name in names),
    ]
    return parts.grid(page, "documents", columns, rows, detail="document", items=items, noun="documents")


def _key(board: Board, task: str, shared: Shared) -> Iterator[ScoreKey]:
    """The task's first metric that has a number for each shared document of every run; none where there is none."""
    for key in board.runs[shared.runs[0]].results if shared.rows else ():
        scores = {place: board.runs[place].scores.get(key, {}) for place in shared.runs}
        if key[0] == task and all(set(shared.documents(place)) <= own.keys() for place, own in scores.items()):
            yield key
            return


def _document(
    board: Board, key: ScoreKey, numbers: dict[int, int], known: Question | None, room: int
) -> tuple[dict[str, Any], list[Any]]:
    """A document's panel, and its cells after its number. numbers: the document's, by model's place."""
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
        answers.append([name, None if answer is None else parts.beginning(answer, share), finite, right])
        marks.append(right)
        said.append(answer)
    judged = [mark for mark in marks if mark is not None]
    counted = f"{sum(judged)} of {len(judged)}" if judged else ""
    alike = len(set(said)) == 1 if None not in said else None
    question, target = ("", "") if known is None else (known.question, known.target)
    item = {
        "name": f"{key[0]} doc {next(iter(numbers.values()))}",
        "question": None if known is None else [question[-(room // 4) :], parts.beginning(target, room // 8)],
        "metric": key[1],
        "answers": answers,
    }
    preview = parts.beginning(" ".join(question.split()), 4 * CELL)[:CELL]
    return item, [preview, counted, alike, *(marks if len(marks) <= MODEL_COLUMNS else ())]
