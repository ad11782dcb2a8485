"""The comparison of models on the terminal, and as Markdown and LaTeX (booktabs) for a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from evalengine.plain_text import printable
from evalengine.report.compare.regressions import regression_lines
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.headline import both_names, headline, regressed
from evalengine.report.leaderboard.sheets import (
    cut_cells,
    cut_head,
    group_sheet,
    matrix_sheet,
    models_sheet,
    rank,
    ranks_note,
    scores_sheet,
    tests_sheet,
    titled,
    verdict,
)
from evalengine.report.terminal.tables import bullets
from evalengine.util.sheet import Line, Sheet, escaped, latex_table, markdown_table


def board_lines(comparison: Board) -> Iterator[Line]:
    """Everything to print, in order; a string is one line."""
    yield f"{headline(comparison)}."
    if (pair := regressed(comparison)) is not None:
        yield from regression_lines(pair, both_names(comparison))
    yield models_sheet(comparison)
    yield from bullets("Notes", comparison.notes)
    for sheet in (scores_sheet(comparison), *(group_sheet(comparison, members) for members in comparison.groups)):
        if sheet.title != "Metrics":
            yield sheet.title
        yield sheet
        if sheet.note:
            yield sheet.note
    if comparison.family:
        sheet = tests_sheet(comparison)
        yield sheet
        yield sheet.note
    yield f"verdict: {verdict(comparison)}"


def markdown(board: Board) -> str:
    """Tables that GitHub shows; the best value of each metric is bold."""
    parts = [f"**{escaped(headline(board))}.**", f"{escaped(verdict(board))}."]
    for sheet in _sheets(board):
        parts.append(f"### {escaped(sheet.title)}")
        parts.append(markdown_table(sheet))
    parts += ["### Models", markdown_table(models_sheet(board))]
    if board.notes:
        parts += ["### Notes", "\n".join(f"- {escaped(note)}" for note in board.notes)]
    return "\n\n".join(parts) + "\n"


def latex(board: Board) -> str:
    """A LaTeX table environment for each table; needs \\usepackage{booktabs}."""
    parts = ["% needs \\usepackage{booktabs}; made by evalengine compare"]
    parts += [latex_table(sheet) for sheet in _sheets(board)]
    models = (f"model {' · '.join(cell for cell in row if cell)}" for row in models_sheet(board).rows)
    comments = [f"% {printable(' '.join(line.split()))}" for line in (*models, *board.notes)]
    return "\n\n".join([*parts, "\n".join(comments)]) + "\n"


def _sheets(board: Board) -> Iterator[Sheet]:
    sheet = matrix_sheet(board, board.tested)
    note = "In brackets: 95 % interval." + (" Bold: ahead of every other by a significant test." if sheet.best else "")
    yield replace(sheet, note=note)
    if cut_head(board):
        yield _cut(board)
    if board.family:
        yield _ranks(board)
        yield tests_sheet(board)
    yield from (group_sheet(board, members) for members in board.groups)


def _cut(board: Board) -> Sheet:
    """What length limits cut of each model, and its value on what they did not."""
    rows = [[titled(entry), *(", ".join(filter(None, cut_cells(board, entry, n))) for n in range(len(board.names)))]
            for entry in board.tested]  # fmt: skip
    note = "The share of a model's documents with an answer that its length limit ended, and its value on the others."
    return Sheet("Cut at the limit", ["Metric", *board.names], rows, (0,), note=note)


def _ranks(board: Board) -> Sheet:
    ranked = [entry for entry in board.tested if any(s is not None and s.rank is not None for s in entry.scores)]
    rows = [[titled(entry), *(rank(score) for score in entry.scores)] for entry in ranked]
    return Sheet("Ranks", ["Metric", *board.names], rows, (0,), note=ranks_note(board))
