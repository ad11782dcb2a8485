"""The tests of several models as a matrix on the page: each row's model against each column's."""

from __future__ import annotations

from evalengine.report.html.markup import Markup, tag
from evalengine.report.html.parts import table
from evalengine.report.leaderboard.board import Contest, PairTest
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.sheets import number, signed
from evalengine.report.numbers import p_value

LEAST = 3  # models from which on pairs are many


def tests_matrix(board: Board, contest: Contest) -> Markup:
    """Values on the diagonal; beside it row minus column, Holm's p, and how many answers differ."""
    tests = {(test.b, test.a): test for test in contest.tests}
    numbers = range(1, len(board.names) + 1)
    rows = []
    for row in numbers:
        label = tag("span", f"{row}. {board.names[row - 1]}", class_="setting")
        rows.append([label, *(_cell(contest, tests, row, column) for column in numbers)])
    return table(("", *(f"{n}" for n in numbers)), rows, class_="matrix")


def _cell(contest: Contest, tests: dict[tuple[int, int], PairTest], row: int, column: int) -> Markup:
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
