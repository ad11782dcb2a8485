"""Two models as two runs, for what went from right to wrong between them."""

from __future__ import annotations

from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.two_runs import with_questions
from evalengine.report.leaderboard.compose import Board


def regressed(board: Board) -> Comparison | None:
    """The comparison of the board's two models; None for more of them, and where a document has another number in one
    run than in the other: two runs are compared by number."""
    if len(board.runs) != 2:
        return None
    for shared in board.shared.values():
        if len(shared.runs) == 2 and (not shared.rows or any(x != y for x, y in shared.rows)):
            return None
    return with_questions(compare(*board.runs))


def both_names(board: Board) -> tuple[str, str]:
    """The names of the two models."""
    first, second = board.names
    return first, second
