"""The comparison of models in every form but a page: the terminal, Markdown and LaTeX (booktabs) for a document, CSV
and JSON for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from evalengine.plain_text import printable
from evalengine.report.compare.as_json import cut_json, run_json
from evalengine.report.compare.report import regression_lines
from evalengine.report.leaderboard import sheets
from evalengine.report.leaderboard.board import Contest
from evalengine.report.leaderboard.compose import Board
from evalengine.report.numbers import finite_json
from evalengine.report.read.run import by_name
from evalengine.report.stats.metric_interval import cut_of
from evalengine.util.sheet import Line, Sheet, escaped, latex_table, markdown_table
from evalengine.util.tables import bullets


def board_lines(comparison: Board) -> Iterator[Line]:
    """Everything to print, in order; a string is one line."""
    yield f"{sheets.headline(comparison)}."
    if (pair := sheets.regressed(comparison)) is not None:
        yield from regression_lines(pair, sheets.both_names(comparison))
    yield sheets.models_sheet(comparison)
    yield from bullets("Notes", comparison.notes)
    groups = [sheets.group_sheet(comparison, members) for members in comparison.groups]
    tests = [sheets.tests_sheet(comparison, comparison.tested)] if comparison.family else []
    for sheet in (sheets.scores_sheet(comparison, comparison.tested), *groups, *tests):
        if sheet in groups:
            yield sheet.title
        yield sheet
        if sheet.notes:
            yield sheet.notes
    yield f"verdict: {sheets.verdict(comparison)}"


def markdown(board: Board) -> str:
    """Tables that GitHub shows; the best value of each metric is bold."""
    parts = [f"**{escaped(sheets.headline(board))}.**", f"{escaped(sheets.verdict(board))}."]
    for sheet in _sheets(board):
        parts.append(f"### {escaped(sheet.title)}")
        parts.append(markdown_table(sheet))
    parts += ["### Models", markdown_table(sheets.models_sheet(board))]
    if board.notes:
        parts += ["### Notes", "\n".join(f"- {escaped(note)}" for note in board.notes)]
    return "\n\n".join(parts) + "\n"


def latex(board: Board) -> str:
    """A LaTeX table environment for each table; needs \\usepackage{booktabs}."""
    parts = ["% needs \\usepackage{booktabs}; made by evalengine compare"]
    parts += [latex_table(sheet) for sheet in _sheets(board)]
    models = (f"model {' · '.join(cell for cell in row if cell)}" for row in sheets.models_sheet(board).rows)
    comments = [f"% {printable(' '.join(line.split()))}" for line in (*models, *board.notes)]
    return "\n\n".join([*parts, "\n".join(comments)]) + "\n"


def _sheets(board: Board) -> Iterator[Sheet]:
    sheet = sheets.matrix_sheet(board, board.tested)
    note = "In brackets: 95 % interval." + (" Bold: ahead of every other by significant tests." if sheet.best else "")
    yield replace(sheet, note=note)
    if sheets.cut_head(board):
        yield _cut(board)
    if board.family:
        yield _ranks(board)
        yield sheets.tests_sheet(board, board.tested)
    yield from (sheets.group_sheet(board, members) for members in board.groups)


def _cut(board: Board) -> Sheet:
    """Each model's share of truncated answers, and its value on the other documents."""
    cells = [[sheets.cut_cells(board, entry, n) for n in range(len(board.names))] for entry in board.tested]
    rows = [[sheets.titled(entry), *(", ".join(filter(None, cell)) for cell in row)]
            for entry, row in zip(board.tested, cells, strict=True)]  # fmt: skip
    note = "The share of a model's documents with an answer that its length limit ended, and its value on the others."
    return Sheet("Cut at the limit", ["Metric", *board.names], rows, (0,), note=note)


def _ranks(board: Board) -> Sheet:
    rows = [[sheets.titled(entry), *(" ".join(sheets.rank_cells(score)).strip() for score in entry.scores)]
            for entry in board.tested if entry.first]  # fmt: skip
    return Sheet("Ranks and tie groups", ["Metric", *board.names], rows, (0,), note=sheets.ranks_note(board))


NATS = " (nats a document)"
FORMAT, VERSION = "evalengine.models", 2  # the version rises when a name below changes its meaning or is removed
COLUMNS = (
    *("row", "group", "task", "metric", "filter", "mean", "model", "against", "value", "ci_low", "ci_high"),
    *("rank_best", "rank_worst", "tie_group", "documents", "wins", "losses", "ties", "p", "p_holm"),
    *("answers_changed", "cut", "value_cut", "value_finished", "cautions"),
)


def comma_separated(board: Board) -> str:
    """One table of numbers as they are, shares of 1 and p-values unrounded. `row` says what a line is: `score` (a
    model's value), `part` (of a group, untested) or `test` (`model` against `against`, value = their difference).
    `cut`: the share of the model's documents with an answer that its length limit ended."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for contest in board.tested:
        writer.writerows(_csv_rows(_contest_json(board, contest), "score"))
    for group in board.groups:
        for part in (*group.parts, *group.whole):
            writer.writerows(_csv_rows({**_contest_json(board, part), "group": group.name}, "part"))
    return out.getvalue()


def _csv_rows(contest: dict[str, Any], row: str) -> Iterator[dict[str, Any]]:
    """A row for each score and each test of a contest as JSON."""
    for content in filter(None, (*contest["scores"], *contest["tests"])):
        own = {**contest, **content}
        if "difference" in content:
            own |= {"row": "test", "model": own["b"], "against": own["a"], "value": own["difference"]}
            own |= {"documents": own["n"], "p": own["p_value"], "metric": own["metric"] + NATS * own["nats"]}
        else:
            cut = own["cut"] or {}
            own |= {"row": row, **dict(zip(("ci_low", "ci_high"), own["interval"] or (), strict=False))}
            own |= dict(zip(("rank_best", "rank_worst"), own["ranks"] or (), strict=False))
            own |= {"cut": cut and cut["count"] / cut["total"], "value_cut": cut.get("cut")}
            own |= {"value_finished": cut.get("finished")}
        own["cautions"] = "; ".join(own["cautions"])
        yield {name: _plain(own[name]) for name in COLUMNS if own.get(name) not in (None, {})}


def board_json(board: Board) -> dict[str, Any]:
    """The whole comparison, with names that stay. Numbers that are not finite are null."""
    content: dict[str, Any] = finite_json({
        "format": FORMAT,
        "version": VERSION,
        "verdict": sheets.verdict(board),
        "models": [
            {"model": name, "step": board.steps[n] if board.steps else None, **run_json(run)}
            for n, (run, name) in enumerate(zip(board.runs, board.names, strict=True))
        ],
        "metrics": [_contest_json(board, contest) for contest in board.contests],
        "groups": [
            {
                "name": group.name,
                "parts": [_contest_json(board, part) for part in group.parts],
                "means": [_contest_json(board, mean) for mean in (*group.means, *group.whole)],
            }
            for group in board.groups
        ],
        "tests": board.family,
        "significant": board.significant,
        "notes": board.notes,
    })  # fmt: skip
    return content


def _plain(value: Any) -> Any:
    """A text for a spreadsheet, which would take one that begins like a formula for one, and for a terminal."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _contest_json(board: Board, contest: Contest) -> dict[str, Any]:
    return {
        **by_name(contest.key),
        "mean": contest.mean or None,
        "higher_is_better": contest.higher_is_better,
        "documents": contest.documents,
        "scores": [
            None
            if score is None
            else {
                "model": name,
                "value": score.value,
                "interval": score.interval,
                "ranks": score.ranks,
                "tie_group": score.tie_group or None,
                "cautions": score.cautions,
                "cut": cut_json(cut_of(run, contest.key)),
            }
            for run, name, score in zip(board.runs, board.names, contest.scores, strict=True)
        ],
        "tests": [
            {
                "a": board.names[test.a - 1],
                "b": board.names[test.b - 1],
                "p_holm": test.p_adjusted,
                "significant": test.significant,
                "nats": test.nats,
                "answers_changed": test.changed,
                **asdict(test.result),
            }
            for test in contest.tests
        ],
    }
