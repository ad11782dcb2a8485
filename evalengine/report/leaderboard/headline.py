"""Several models in one sentence, by which a person decides; and two of them as two runs, for what went from right to
wrong."""

from __future__ import annotations

import math

from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.headline import Scale, test_words
from evalengine.report.compare.two_runs import with_questions
from evalengine.report.leaderboard.board import Contest, PairTest
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.sheets import value_with_unit


def headline(board: Board) -> str:
    """The sentence, without a full stop: of two models the surest difference, of more the one that is ahead, if any."""
    tests = [(contest, test) for contest in board.tested for test in contest.tests]
    if not tests:
        return "No pair of models could be tested"
    if len(board.runs) == 2:
        contest, test = min(tests, key=lambda one: (one[1].p_adjusted, one[1].result.p_value))
        others = [other for _, other in tests if other is not test]
        said = f"{f'On {contest.name}, ' if others else ''}{_test(board, contest, test)}"
        sure = sum(other.significant for other in others)
        rest = f"; {sure or 'no'} other of the {len(tests)} tests shows a difference" if others else ""
        return f"{said}{rest}"
    ahead = [contest for contest in board.tested if contest.leader is not None]
    if ahead:
        contest = ahead[0]
        assert contest.leader is not None
        score = value_with_unit(contest, contest.scores[contest.leader])
        more = f", and likewise on {len(ahead) - 1} more" if len(ahead) > 1 else ""
        return f"{board.names[contest.leader]} is ahead of every other model on {contest.name} ({score}){more}"
    if not board.significant:
        contest, test = max(tests, key=lambda one: (one[0] is tests[0][0], _size(one[1])))
        largest = f"; the largest difference: {_test(board, contest, test)}" if test.result.difference else ""
        return f"All {len(board.runs)} models are tied on {contest.name}{largest}"
    return f"No model is ahead of all others; {board.significant} of {board.family} differences are real"


def _test(board: Board, contest: Contest, test: PairTest) -> str:
    share = contest.share and not test.nats
    unit = " points" if share else " nats a document" if test.nats else ""
    higher = True if test.nats else contest.higher_is_better
    scale = Scale(share, unit, higher)
    who, than = board.names[test.b - 1], board.names[test.a - 1]
    return test_words(test.result, test.p_adjusted, scale, who=who, than=than)


def _size(test: PairTest) -> float:
    size = abs(test.result.difference)
    return size if math.isfinite(size) else -1.0


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
