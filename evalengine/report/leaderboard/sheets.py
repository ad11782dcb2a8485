"""The comparison of models as plain tables of words: every form of output is made from these.
And in one sentence, by which a person decides; and two of the models as two runs, for what went from right to wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evalengine.report.compare.compare import Comparison, compare, with_questions
from evalengine.report.compare.headline import test_words
from evalengine.report.compare.report import PAIRED, paired_cells
from evalengine.report.leaderboard.board import Contest, PairTest, Score
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.means import Group
from evalengine.report.numbers import arrow, counted, shown
from evalengine.report.read.run import provenance
from evalengine.report.stats.metric_interval import cut_of
from evalengine.report.stats.significance import ALPHA
from evalengine.util.sheet import Interval, Sheet

RANKED = ("Rank", "Tie group")  # the columns of `rank_cells`
WIDE = 6  # metrics side by side; with more, models are the columns
LEADERS = 3  # metrics whose first place the verdict says
LARGE = 10_000  # from here on six significant digits say enough
CUT = "Cut: a model's documents with an answer that its length limit ended; Finished: its value on the others."
PERCENT = f"{ALPHA * 100:g} %"


def models_sheet(board: Board) -> Sheet:
    """The models, each with the run that it is known by."""
    rows = []
    for number, (run, name) in enumerate(zip(board.runs, board.names, strict=True), 1):
        origin = provenance(run)
        step = [] if board.steps is None else [f"{board.steps[number - 1]:,}"]
        ids = (origin.run_id or "", (run.digest or "none")[:12])
        rows.append([str(number), name, *step, origin.date, *ids, str(run.source)])
    step_head = [] if board.steps is None else ["Step"]
    head = ["", "Model", *step_head, "Date", "Run", "Digest", "Folder"]
    return Sheet("Models", head, rows, tuple(n for n in range(len(head)) if head[n] not in ("", "Step")))


def scores_sheet(board: Board, contests: Sequence[Contest]) -> Sheet:
    """A row for each of these metrics and each model, in the order of `row_order`."""
    rows, best = list[list[str]](), set[tuple[int, int]]()
    for contest in contests:
        first = titled(contest)
        for place in row_order(board, contest):
            score = contest.scores[place]
            if leads(contest, score):
                best.add((len(rows), 2))
            cells = [number(contest, score) or "not run", *rank_cells(score), between(contest, score)]
            documents = "" if score is None else f"{contest.documents:,}"
            rows.append([first, board.names[place], *cells, documents, *cut_cells(board, contest, place)])
            first = ""
    head = ["Metric", "Model", "Value", *RANKED, "95 % interval", "Documents", *cut_head(board)]
    about = dict.fromkeys(RANKED, ranks_note(board)) | dict.fromkeys(cut_head(board), CUT)
    return Sheet("Metrics", head, rows, (0, 1, 4), frozenset(best), about=about)


def cut_head(board: Board) -> list[str]:
    """The columns of what length limits cut; none where they cut nothing."""
    return ["Cut", "Finished"] if any(run.cut for run in board.runs) else []


def cut_cells(board: Board, contest: Contest, place: int) -> list[str]:
    """A model's cells of `cut_head`: the share of its documents with a cut answer, and the value on the others."""
    if not cut_head(board):
        return []
    cut = cut_of(board.runs[place], contest.key)
    if cut is None:
        return ["", ""]
    finished = "" if cut.finished is None else signed(cut.finished, contest.share, sign=False)
    return [f"{100 * cut.count / cut.total:.1f} %", finished]


def matrix_sheet(board: Board, contests: Sequence[Contest]) -> Sheet:
    """Models by metrics, the form for a document: models as rows while the metrics fit side by side."""
    cells = [[matrix_cell(entry, score) for score in entry.scores] for entry in contests]
    best = {(m, n) for m, entry in enumerate(contests) for n, score in enumerate(entry.scores) if leads(entry, score)}
    if len(contests) <= WIDE:
        head = ["Model", *(titled(entry) for entry in contests)]
        rows = [[name, *(column[n] for column in cells)] for n, name in enumerate(board.names)]
        return Sheet("Metrics", head, rows, (0,), frozenset((n, m + 1) for m, n in best))
    rows = [[titled(entry), *column] for entry, column in zip(contests, cells, strict=True)]
    return Sheet("Metrics", ["Metric", *board.names], rows, (0,), frozenset((m, n + 1) for m, n in best))


def group_sheet(board: Board, group: Group) -> Sheet:
    """A group's parts and its means, a column for each model."""
    rows, best = [], set()
    for row, part in enumerate([*group.parts, *group.means, *group.whole]):
        label = f"{part.mean} mean" if part.mean else part.key[0]
        cells = [number(part, score) for score in part.scores]
        rows.append([label, f"{part.documents:,}", *cells])
        best |= {(row, n + 2) for n, score in enumerate(part.scores) if leads(part, score)}
    metric = " ".join(name for name in (group.means or group.parts)[0].key[1:] if name not in ("none", ""))
    unit = ", %" if all(part.share for part in group.parts) else ""
    means = "Macro: the mean of the parts' values. Micro: over all documents."
    return Sheet(f"{group.name}: {metric}{unit}", ["", "Documents", *board.names], rows, (0,), frozenset(best), means)


def tests_sheet(board: Board, contests: Sequence[Contest]) -> Sheet:
    """A row for each test of these metrics, in the order of metrics and pairs."""
    tests = [(contest, test) for contest in contests for test in contest.tests]
    rows = [_test_row(board, contest, test) for contest, test in tests]
    head = ["Metric", "B against A", *PAIRED, "Documents", "Answers changed"]
    sure = frozenset((row, head.index(PAIRED[-1])) for row, (_, test) in enumerate(tests) if test.significant)
    return Sheet("Paired tests", head, rows, (0, 1), sure, about=dict.fromkeys(PAIRED[3:], tests_note(board)))


def ranks_note(board: Board) -> str:
    if not board.family:
        return ""
    return (
        f"Rank: the places that the tests significant at {PERCENT} (Holm) leave open; with 95 % confidence they "
        "hold all true ranks of this comparison. Models that share a tie group's letter are tied, in whatever order."
    )


def tests_note(board: Board) -> str:
    return (
        f"p: of each test alone. p (Holm): corrected for the {counted(board.family, 'test')} of this comparison "
        "together, two-sided, on the same documents. Exact McNemar for 0/1 scores; else the larger p of the paired "
        "permutation test and of the interval."
    )


def verdict(board: Board) -> str:
    """The outcome on one line."""
    if not board.family:
        return "no pair of models could be tested"
    counts = f"{board.significant} of {board.family} differences significant at {PERCENT} (Holm)"
    counts += churn(board)
    first = [leader(board, contest) or tie(contest) for contest in board.tested]
    shown = list(dict.fromkeys(filter(None, first)))
    more = f"; and {len(shown) - LEADERS} more" if len(shown) > LEADERS else ""
    return f"{counts}; {'; '.join(shown[:LEADERS])}{more}" if shown else counts


def churn(board: Board) -> str:
    """How many answers differ, which equal scores hide: `; 150 of 200 answers changed`; "" where that is not known."""
    known = [(t.changed, t.result.n) for entry in board.tested for t in entry.tests if t.changed is not None]
    if not known:
        return ""
    changed, count = max(known)
    between = "" if len(known) == 1 else " between two models"
    return f"; {'up to ' if between else ''}{changed:,} of {count:,} answers changed{between}"


def leader(board: Board, contest: Contest) -> str:
    """The model that is surely ahead: `best on sums exact_match: tuned (77.0 %)`; "" where there is none."""
    if contest.leader is None:
        return ""
    score = contest.scores[contest.leader]
    return f"best on {contest.name}: {board.names[contest.leader]} ({value_with_unit(contest, score)})"


def tie(contest: Contest) -> str:
    """Who may all be first: `no best on sums exact_match: 7 models are tied for first`; "" where nothing was tested."""
    return f"no best on {contest.name}: {len(contest.first)} models are tied for first" if contest.first else ""


def titled(contest: Contest) -> str:
    """The metric with its unit and direction."""
    return f"{contest.name}{', %' if contest.share else ''} {arrow(contest.higher_is_better)}".rstrip()


def number(contest: Contest, score: Score | None) -> str:
    """A value: percent with one digit for shares, else four significant digits and more."""
    if score is None:
        return ""
    return signed(score.value, contest.share, sign=False)


def value_with_unit(contest: Contest, score: Score | None) -> str:
    return number(contest, score) + (" %" if contest.share and score is not None else "")


def signed(value: float, share: bool, sign: bool = True) -> str:
    """A number for a reader: no `-0.0`, and no `inf`, which says nothing."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "unbounded"
    digits = ".4f" if abs(value) < LARGE else ".6g"
    return shown(100 * value, f"{'+' * sign}.1f") if share else shown(value, f"{'+' * sign}{digits}")


def between(contest: Contest, score: Score | None) -> str:
    """A value's interval, `[70.7, 82.3]`; "" where there is none."""
    if score is None or score.interval is None or not all(map(math.isfinite, score.interval)):
        return ""
    low, high = (signed(bound, contest.share, sign=False) for bound in score.interval)
    return Interval(f"[{low}, {high}]", (score.value, *score.interval))


def rank_cells(score: Score | None) -> list[str]:
    """A model's cells of `RANKED`: `1-3` and `ab`; empty where nothing was tested."""
    if score is None or score.ranks is None:
        return ["", ""]
    return ["-".join(str(rank) for rank in dict.fromkeys(score.ranks)), score.tie_group]


def row_order(board: Board, contest: Contest) -> list[int]:
    """The models' places in the order of a table's rows: checkpoints as given, others by rank interval. Models of one
    interval, or without one, stay as given."""
    last = (len(board.names) + 1, 0)
    ranks = [(score.ranks if score is not None else None) or last for score in contest.scores]
    return sorted(range(len(ranks)), key=lambda n: last if board.steps is not None else ranks[n])


def matrix_cell(contest: Contest, score: Score | None) -> str:
    """A value with its interval: `77.0 [70.7, 82.3]`."""
    parts = (number(contest, score), between(contest, score))
    return " ".join(part for part in parts if part)


def leads(contest: Contest, score: Score | None) -> bool:
    """Whether this model is surely ahead of all others."""
    return score is not None and score.ranks == (1, 1) and len(contest.scores) > 1


def _test_row(board: Board, contest: Contest, test: PairTest) -> list[str]:
    p, share = test.result, contest.share and not test.nats
    return [
        contest.name + (" (nats a document)" if test.nats else ", points" if share else ""),
        f"{board.names[test.b - 1]} against {board.names[test.a - 1]}",
        *paired_cells(p, test.p_adjusted, lambda value: signed(value, share), "nats" if test.nats else ""),
        f"{p.n:,}",
        "" if test.changed is None else f"{test.changed:,}",
    ]


def headline(board: Board) -> str:
    """The sentence, without a full stop: of two models the surest difference, of more the one that is ahead, if any."""
    tests = [(contest, test) for contest in board.tested for test in contest.tests]
    if not tests:
        return "No pair of models could be tested"
    if len(board.runs) == 2:
        contest, test = min(tests, key=lambda one: (one[1].p_adjusted, one[1].result.p_value))
        others = [other for _, other in tests if other is not test]
        said = f"{f'On {contest.name}, ' if others else ''}{_pair_words(board, contest, test)}"
        sure = sum(other.significant for other in others)
        rest = f"; {sure or 'no'} other of the {len(tests)} tests shows a difference" if others else ""
        return f"{said}{rest}"
    ahead = [contest for contest in board.tested if contest.leader is not None]
    if ahead:
        contest = ahead[0]
        assert contest.leader is not None
        score = value_with_unit(contest, contest.scores[contest.leader])
        more = f", and likewise on {len(ahead) - 1} more" if len(ahead) > 1 else ""
        count = sum(score is not None and score.ranks is not None for score in contest.scores)
        rest = f"the {f'{count - 1} other models' if count > 2 else 'only other model'} with a value"
        rest = rest if count < len(board.runs) else "every other model"
        return f"{board.names[contest.leader]} is ahead of {rest} on {contest.name} ({score}){more}"
    if not board.significant:
        contest, test = max(tests, key=lambda one: (one[0] is tests[0][0], _distance(one[1])))
        largest = f"; the largest difference: {_pair_words(board, contest, test)}" if test.result.difference else ""
        count = len({place for own in contest.tests for place in (own.a, own.b)})
        tied = f"The {count} models with a value" if count < len(board.runs) else f"All {count} models"
        return f"{tied} are tied on {contest.name}{largest}"
    return f"No model is ahead of all others; {board.significant} of {board.family} differences are significant"


def _pair_words(board: Board, contest: Contest, test: PairTest) -> str:
    share = contest.share and not test.nats
    unit = " points" if share else " nats a document" if test.nats else ""
    higher = True if test.nats else contest.higher_is_better
    who, than = board.names[test.b - 1], board.names[test.a - 1]
    return test_words(test.result, test.p_adjusted, share, unit, higher, who=who, than=than)


def _distance(test: PairTest) -> float:
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
    return with_questions(compare(board.runs[0], board.runs[1]))


def both_names(board: Board) -> tuple[str, str]:
    """The names of the two models."""
    first, second = board.names
    return first, second
