"""Models compared, on the terminal: tables, their notes, and the verdict as the last line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from evalengine.report.compare.regressions import regression_lines
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.headline import headline
from evalengine.report.leaderboard.regressed import both_names, regressed
from evalengine.report.leaderboard.sheets import Sheet, group_sheet, models_sheet, scores_sheet, tests_sheet, verdict
from evalengine.report.terminal.tables import add, bullets, house_table


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
