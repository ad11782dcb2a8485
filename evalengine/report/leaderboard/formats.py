"""The comparison of models on the terminal, and as Markdown and LaTeX (booktabs) for a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from evalengine.plain_text import printable
from evalengine.report.compare.regressions import regression_lines
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.headline import both_names, headline, regressed
from evalengine.report.leaderboard.sheets import (
    MINUS,
    Sheet,
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
from evalengine.report.terminal.tables import add, bullets, house_table

_TEX = {
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
    MINUS: "$-$",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "±": "$\\pm$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "[": "{[}",
}


def board_lines(comparison: Board) -> Iterator[Table | str]:
    """Everything to print, in order; a string is one line."""
    yield f"{headline(comparison)}."
    if (pair := regressed(comparison)) is not None:
        yield from regression_lines(pair, both_names(comparison))
    yield _table(models_sheet(comparison))
    yield from bullets("Notes", comparison.notes)
    for sheet in (scores_sheet(comparison), *(group_sheet(comparison, members) for members in comparison.groups)):
        if sheet.title != "Metrics":
            yield sheet.title
        yield _table(sheet)
        if sheet.note:
            yield sheet.note
    if comparison.family:
        sheet = tests_sheet(comparison)
        yield _table(sheet)
        yield sheet.note
    yield f"verdict: {verdict(comparison)}"


def _table(sheet: Sheet) -> Table:
    table = house_table(sheet.head, left=sheet.words)
    for row in sheet.rows:
        add(table, row)
    return table


def markdown(board: Board) -> str:
    """Tables that GitHub shows; the best value of each metric is bold."""
    parts = [f"**{escaped(headline(board))}.**", f"{escaped(verdict(board))}."]
    for sheet in _sheets(board):
        parts.append(f"### {escaped(sheet.title)}")
        parts.append(markdown_table(sheet))
    models = models_sheet(board)
    parts += ["### Models", "\n".join(_markdown_rows(models))]
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


def latex_table(sheet: Sheet) -> str:
    """One table environment, its note in the caption; needs \\usepackage{booktabs}."""
    columns = "".join("l" if n in sheet.words else "r" for n in range(len(sheet.head)))
    note = f" {_tex(sheet.note)}" if sheet.note else ""
    rows = [" & ".join(_tex_cells(sheet, n, row)) + " \\\\" for n, row in enumerate(sheet.rows)]
    return "\n".join([
        *("\\begin{table}", "\\centering", f"\\caption{{{_tex(sheet.title)}.{note}}}"),
        *(f"\\begin{{tabular}}{{{columns}}}", "\\toprule", " & ".join(map(_tex, sheet.head)) + " \\\\"),
        *("\\midrule", *rows, "\\bottomrule", "\\end{tabular}", "\\end{table}"),
    ])  # fmt: skip


def markdown_table(sheet: Sheet) -> str:
    """One table as GitHub shows it, its note below."""
    note = f"\n\n{escaped(sheet.note)}" if sheet.note else ""
    return "\n".join(_markdown_rows(sheet)) + note


def _sheets(board: Board) -> Iterator[Sheet]:
    sheet = matrix_sheet(board, board.tested)
    note = "In brackets: 95 % interval." + (" Bold: ahead of every other by a significant test." if sheet.best else "")
    yield Sheet(sheet.title, sheet.head, sheet.rows, sheet.words, sheet.best, note)
    if board.family:
        yield _ranks(board)
        yield tests_sheet(board)
    yield from (group_sheet(board, members) for members in board.groups)


def _ranks(board: Board) -> Sheet:
    ranked = [entry for entry in board.tested if any(s is not None and s.rank is not None for s in entry.scores)]
    rows = [[titled(entry), *(rank(score) for score in entry.scores)] for entry in ranked]
    return Sheet("Ranks", ["Metric", *board.names], rows, (0,), note=ranks_note(board))


def _markdown_rows(sheet: Sheet) -> Iterator[str]:
    yield f"| {' | '.join(map(escaped, sheet.head))} |"
    yield f"|{'|'.join(' :-- ' if n in sheet.words else ' --: ' for n in range(len(sheet.head)))}|"
    for place, row in enumerate(sheet.rows):
        cells = (f"**{escaped(cell)}**" if (place, n) in sheet.best else escaped(cell) for n, cell in enumerate(row))
        yield f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """A text from outside as Markdown that shows it as it is."""
    text = printable(" ".join(text.split()))
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#&~" else char for char in text)


def _tex_cells(sheet: Sheet, place: int, row: Sequence[str]) -> Iterator[str]:
    for n, cell in enumerate(row):
        text = _tex(cell)
        yield f"\\textbf{{{text}}}" if (place, n) in sheet.best else text


def _tex(text: str) -> str:
    return "".join(_TEX.get(char, char) for char in printable(" ".join(text.split())))
