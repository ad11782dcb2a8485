"""Different models on the same tasks as a page: who leads and whether that is chance, metric by metric."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from evalengine.records.evidence import PAGE
from evalengine.report.html.comparison_page import listed
from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, facts, origin_line, row_of, sheet_table, table, tiles, verdict
from evalengine.report.html.plots import interval
from evalengine.report.html.regressions import regressions_section
from evalengine.report.leaderboard import sheets
from evalengine.report.leaderboard.board import Contest, PairTest, Score
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.documents import documents_grid
from evalengine.report.leaderboard.headline import both_names, headline, regressed
from evalengine.report.leaderboard.history import curves, history_picture, history_plot, is_history
from evalengine.report.leaderboard.means import Group
from evalengine.report.leaderboard.numbers import board_json
from evalengine.report.leaderboard.sheets import number, signed
from evalengine.report.numbers import counted, p_value
from evalengine.report.read.names import SWEEP_FORMAT
from evalengine.report.sweep.write import VERSION, write_picture_and_list

LEAST = 3  # models from which on pairs are many
OPEN = 6  # metrics shown in full; further ones are folded
PARTS = 12  # a group of at most so many parts is shown unfolded
TILES = 3  # metrics in the first figures
HISTORY = (
    "Whiskers: each value's own 95 % interval. Band: the change since the first checkpoint, in pairs on the same "
    "documents; where it leaves the dashed line, the change is more than chance explains, each by itself."
)
MATRIX = (
    "Row minus column, Holm's p, and how many answers differ, right or wrong; on the diagonal the value. Green: the "
    "row is better by a significant test; red: it is worse."
)
DOCUMENTS = (
    "Which models answered each document right, by each task's first metric. A row opens what each of them said."
)


def tests_matrix(board: Board, contest: Contest) -> Markup:
    """Values on the diagonal; beside it row minus column, Holm's p, and how many answers differ."""
    tests = {(test.b, test.a): test for test in contest.tests}
    numbers = range(1, len(board.names) + 1)
    rows = []
    for row in numbers:
        label = tag("span", f"{row}. {board.names[row - 1]}", class_="setting")
        rows.append([label, *(_matrix_cell(contest, tests, row, column) for column in numbers)])
    return table(("", *(f"{n}" for n in numbers)), rows, class_="matrix")


def _matrix_cell(contest: Contest, tests: dict[tuple[int, int], PairTest], row: int, column: int) -> Markup:
    if row == column:
        return tag("span", tag("b", number(contest, contest.scores[row - 1]) or "·"), class_="cell")
    test = tests.get((row, column)) or tests.get((column, row))
    if test is None:
        return tag("span", "not tested", class_="cell refused")
    sign = 1 if test.b == row else -1
    share = contest.share and not test.nats
    lines = [tag("b", signed(sign * test.result.difference, share)), tag("span", f"p {p_value(test.p_adjusted)}")]
    if test.changed is not None:
        lines.append(tag("span", f"{test.changed:,} answers differ"))
    wins = contest.wins(test)
    better = None if wins is None or not test.significant else wins == (sign == 1)
    return tag("span", *lines, class_=f"cell {({True: 'same', False: 'other', None: 'plain'})[better]}")


def leaderboard_page(board: Board, history: bool = False, beside: Path | None = None) -> Page:
    """The comparison of models as a page. history: show the curves even where the models name no steps. beside: the
    folder that the page will lie in, for links to the models' runs."""
    page = Page(_title(board), eyebrow="Models compared", scripts=("models.js",))
    page.lead(verdict(f"{headline(board)}.", f"{sheets.verdict(board)}.", None), tiles(_figures(board)))
    if (pair := regressed(board)) is not None:
        regressions_section(page, pair, both_names(board))
    page.section("metrics", "Metrics", *_metrics(board), note=sheets.metrics_note(board) or None)
    if (history or is_history(board)) and (drawn := curves(board)):
        plots = row_of(*(tag("figure", history_plot(board, contest)) for contest in drawn))
        page.section("history", "History", plots, note=HISTORY)
    if board.groups:
        page.section("groups", "Groups and subjects", *(_group(board, group) for group in board.groups))
    if board.family:
        page.section("tests", "Paired tests", *_tests(board), note=sheets.tests_note(board))
    if (documents := documents_grid(page, board)) is not None:
        page.section("documents", "Documents", documents, note=DOCUMENTS)
    if board.notes:
        page.section("notes", "Notes", listed(board.notes))
    page.section("models", "Models", facts(_models(board, beside)))
    return page


def _title(board: Board) -> str:
    tasks = list(dict.fromkeys(contest.key[0] for contest in board.contests)) + [group.name for group in board.groups]
    tasks_text = ", ".join(tasks) if 0 < len(tasks) <= 3 else counted(len(tasks), "task")
    return f"{len(board.runs)} models on {tasks_text}"


def _figures(board: Board) -> Iterator[tuple[str, Child, Child]]:
    for contest in board.tested[:TILES]:
        top = next((n for n, score in enumerate(contest.scores) if score is not None and score.rank == 1), None)
        if top is not None:
            tied = len(contest.first) - (top in contest.first)
            names = board.names[top] + (f", tied with {tied} more" if tied and contest.leader is None else "")
            yield contest.name, sheets.value_with_unit(contest, contest.scores[top]), names
    yield "Models", f"{len(board.runs)}", None
    yield (
        "Significant differences",
        f"{board.significant:,}",
        f"of {counted(board.family, 'test')}, at {sheets.PERCENT}",
    )


def _metrics(board: Board) -> Iterator[Markup]:
    shown = [_contest(board, contest) for contest in board.tested]
    yield from (part for parts in shown[:OPEN] for part in parts)
    if rest := shown[OPEN:]:
        yield details(f"{counted(len(rest), 'more metric')}", *(part for parts in rest for part in parts))


def _contest(board: Board, contest: Contest) -> list[Markup]:
    bounds = _bounds(contest)
    rows = [_score(board, contest, n, score, bounds) for n, score in enumerate(contest.scores)]
    title = tag("h3", f"{sheets.titled(contest)} · {counted(contest.documents, 'document')}")
    cut = sheets.cut_head(board)
    head = ("Model", "Value", "Rank", "95 % interval", *cut, _ends(contest, bounds))
    return [title, table(head, rows, numbers=range(1, 4 + len(cut)))]


def _ends(contest: Contest, bounds: tuple[float, float], sign: bool = False) -> str:
    """The axis of a column of intervals: `65.2 to 91.3`."""
    return " to ".join(sheets.signed(end, contest.share, sign) for end in bounds)


def _score(
    board: Board, contest: Contest, place: int, score: Score | None, bounds: tuple[float, float]
) -> list[Markup | str | None]:
    name = tag("span", board.names[place], class_="name")
    if score is None:
        return [name, "not run", "", "", *("" for _ in sheets.cut_head(board)), None]
    drawn = None
    if score.interval is not None:
        drawn = interval(score.value, *score.interval, bounds)
    value = sheets.number(contest, score)
    best = tag("strong", value) if sheets.leads(contest, score) else value
    between = sheets.between(contest, score.interval)
    return [name, best, sheets.rank(score), between, *sheets.cut_cells(board, contest, place), drawn]


def _bounds(contest: Contest) -> tuple[float, float]:
    """The scale that a metric's intervals share."""
    ends = [end for s in contest.scores if s is not None and s.interval is not None for end in (*s.interval, s.value)]
    if not ends:
        return 0.0, 1.0
    low, high = min(ends), max(ends)
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def _group(board: Board, group: Group) -> Markup:
    sheet = sheets.group_sheet(board, group)
    note = tag("p", sheet.note, class_="note")
    return tag("details", tag("summary", sheet.title), sheet_table(sheet), note, open=len(group.parts) <= PARTS)


def _tests(board: Board) -> Iterator[Markup]:
    for contest in board.tested:
        if not contest.tests:
            continue
        ends = [abs(e) for t in contest.tests for e in (t.result.ci_low, t.result.ci_high) if math.isfinite(e)]
        reach = max(ends, default=0.0) or 1.0
        yield tag("h3", f"{sheets.titled(contest)}{'; differences in points' if contest.share else ''}")
        axis = _ends(contest, (-reach, reach), sign=True)
        head = ("B against A", "B − A", "p", "p (Holm)", "95 % interval", axis, "Won / lost / equal", "Answers changed")
        rows = [_test(board, contest, test, reach) for test in contest.tests]
        pairs = table(head, rows, numbers=(1, 2, 3, 4, 6, 7))
        if len(board.runs) < LEAST:
            yield pairs
        else:
            yield tests_matrix(board, contest)
            yield tag("p", MATRIX, class_="note")
            yield details(f"All {len(rows)} pairs, with intervals", pairs)


def _test(board: Board, contest: Contest, test: PairTest, reach: float) -> Sequence[Markup | str | None]:
    _, _, difference, bounds, counts, p, adjusted, _, changed = sheets.test_row(board, contest, test)
    against = tag("span", f"against {board.names[test.a - 1]}", class_="under name")
    pair = join(tag("span", board.names[test.b - 1], class_="name"), against)
    result, drawn = test.result, None
    if math.isfinite(result.ci_low) and math.isfinite(result.ci_high):
        drawn = interval(result.difference, result.ci_low, result.ci_high, (-reach, reach), rule=0)
    holm = tag("strong", adjusted) if test.significant else adjusted
    unit = " nat" if test.nats else ""
    return [pair, f"{difference}{unit}", p, holm, bounds, drawn, counts, changed]


def _models(board: Board, beside: Path | None) -> Iterator[tuple[str, Child]]:
    for place, (run, name) in enumerate(zip(board.runs, board.names, strict=True)):
        step = f"step {board.steps[place]:,}, " if board.steps is not None else ""
        digest = tag("code", run.digest or "no digest", class_="under")
        target = run.folder / PAGE
        link: Child = str(run.source)
        if beside is not None and target.is_file():
            link = tag("a", link, href=f"./{quote(os.path.relpath(target, beside))}")
        yield name, join(step, link, digest, origin_line(run))


def write_history(board: Board, name: str, folder: Path) -> list[Path]:
    """Writes the three files, each whole or not at all, the list last: it makes the folder a finished experiment's.

    Raises `EvalEngineError` if the disk refuses.
    """
    page = folder / f"{name}.html"
    leaderboard_page(board, history=True, beside=folder).write(page)
    content = board_json(board)
    runs = [{**model, "source": os.path.relpath(model["source"], folder)} for model in content.pop("models")]
    listed = {**content, "format": SWEEP_FORMAT, "version": VERSION, "experiment": name, "runs": runs}
    return [page, *write_picture_and_list(name, folder, history_picture(board), listed)]
