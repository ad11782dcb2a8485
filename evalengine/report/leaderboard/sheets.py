"""The comparison of models as plain tables of words, from which every form of output is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evalengine.report.leaderboard.board import ALPHA, Contest, PairTest, Score
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.means import Group
from evalengine.report.read.provenance import provenance

WIDE = 6  # metrics side by side; with more, models are the columns
MINUS = "\u2212"
LARGE = 10_000  # from here on six significant digits say enough
PERCENT = f"{ALPHA * 100:g} %"


@dataclass(frozen=True)
class Sheet:
    """A table. Cells are plain text, whose minus is U+2212."""

    title: str
    head: list[str]
    rows: list[list[str]]
    words: tuple[int, ...]  # columns of words, set to the left; the others hold numbers
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of what is best, set bold
    note: str = ""


def models_sheet(found: Board) -> Sheet:
    """Which runs these are."""
    rows = []
    for number, (run, name) in enumerate(zip(found.runs, found.names, strict=True), 1):
        made = provenance(run)
        step = [] if found.steps is None else [f"{found.steps[number - 1]:,}"]
        ids = (made.run_id or "", (run.digest or "none")[:12])
        rows.append([str(number), name, *step, made.date, *ids, str(run.source)])
    step_head = [] if found.steps is None else ["Step"]
    head = ["", "Model", *step_head, "Date", "Run", "Digest", "Folder"]
    return Sheet("Models", head, rows, tuple(n for n in range(len(head)) if head[n] not in ("", "Step")))


def scores_sheet(found: Board) -> Sheet:
    """A row a metric and model, the form for a terminal."""
    rows = [row for one in found.tested for row in _long(found, one)]
    head = ["Metric", "", "Model", "Value", "95 % interval", "Rank", "Documents"]
    return Sheet("Metrics", head, rows, (0, 1, 2), note=ranks_note(found))


def matrix_sheet(found: Board, contests: Sequence[Contest], title: str = "Metrics") -> Sheet:
    """Models by metrics, the form for a document: models as rows while the metrics fit side by side."""
    cells = [[matrix_cell(one, score) for score in one.scores] for one in contests]
    best = {(m, n) for m, one in enumerate(contests) for n, score in enumerate(one.scores) if leads(one, score)}
    if len(contests) <= WIDE:
        head = ["Model", *(titled(one) for one in contests)]
        rows = [[name, *(column[n] for column in cells)] for n, name in enumerate(found.names)]
        return Sheet(title, head, rows, (0,), frozenset((n, m + 1) for m, n in best))
    rows = [[titled(one), *column] for one, column in zip(contests, cells, strict=True)]
    return Sheet(title, ["Metric", *found.names], rows, (0,), frozenset((m, n + 1) for m, n in best))


def group_sheet(found: Board, one: Group) -> Sheet:
    """A group's parts and its means, a column a model."""
    rows, best = [], set()
    for row, part in enumerate([*one.parts, *one.means, *one.whole]):
        label = f"{part.mean} mean" if part.mean else part.key[0]
        cells = [number(part, score) for score in part.scores]
        rows.append([label, f"{part.documents:,}", *cells])
        best |= {(row, n + 2) for n, score in enumerate(part.scores) if leads(part, score)}
    metric = " ".join(name for name in (one.means or one.parts)[0].key[1:] if name not in ("none", ""))
    unit = ", %" if all(part.share for part in one.parts) else ""
    means = "Macro: the mean of the parts' values. Micro: over all documents."
    return Sheet(f"{one.name}: {metric}{unit}", ["", "Documents", *found.names], rows, (0,), frozenset(best), means)


def tests_sheet(found: Board) -> Sheet:
    """A row a test, in the order of metrics and pairs."""
    head = ["Metric", "B against A", "B − A", "95 % interval", "Won / lost / equal", "p", "p (Holm)", "Documents"]
    rows = [test_row(found, one, test) for one in found.tested for test in one.tests]
    return Sheet("Paired tests", head, rows, (0, 1), note=tests_note(found))


def ranks_note(found: Board) -> str:
    if not found.family:
        return ""
    return f"Rank: by value, and behind it the ranks that the tests significant at {PERCENT} leave open."


def tests_note(found: Board) -> str:
    tests = f"{found.family} test{'' if found.family == 1 else 's'}"
    return (
        f"p: of each test by itself. p (Holm): corrected for the {tests} of this comparison together. Exact McNemar "
        "for 0/1 scores, else the paired permutation test; two-sided, on the same documents."
    )


def verdict(found: Board) -> str:
    """What came out, on one line."""
    if not found.family:
        return "no pair of models could be tested"
    said = f"{found.significant} of {found.family} differences significant at {PERCENT} (Holm)"
    leaders = dict.fromkeys(leader(found, one) for one in found.tested if leader(found, one))
    return f"{said}; best: {'; '.join(filter(None, list(leaders)[:3]))}" if leaders else said


def leader(found: Board, one: Contest) -> str:
    """`tuned on sums exact_match (77.0 %)`; "" where nothing is ranked."""
    first = [n for n, score in enumerate(one.scores) if score is not None and score.rank == 1]
    if len(first) != 1:
        return ""
    score = one.scores[first[0]]
    return f"{found.names[first[0]]} on {one.name} ({value_with_unit(one, score)})"


def titled(one: Contest) -> str:
    """The metric with its unit and direction."""
    arrow = {True: " ↑", False: " ↓", None: ""}[one.higher_is_better]
    return f"{one.name}{', %' if one.share else ''}{arrow}"


def number(one: Contest, score: Score | None) -> str:
    """A value: percent with one digit for shares, else four significant digits and more."""
    if score is None:
        return ""
    return signed(score.value, one.share, sign=False)


def value_with_unit(one: Contest, score: Score | None) -> str:
    return number(one, score) + (" %" if one.share and score is not None else "")


def signed(value: float, share: bool, sign: bool = True) -> str:
    """A number for a reader: no `-0.0`, and no `inf`, which says nothing."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "unbounded"
    digits = ".4f" if abs(value) < LARGE else ".6g"
    text = f"{value * 100:{'+' * sign}.1f}" if share else f"{value:{'+' * sign}{digits}}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def between(one: Contest, bounds: tuple[float, float] | None, sign: bool = False, share: bool | None = None) -> str:
    """`[70.7, 82.3]`; "" where there is none."""
    if bounds is None or not all(map(math.isfinite, bounds)):
        return ""
    unit = one.share if share is None else share
    return f"[{signed(bounds[0], unit, sign)}, {signed(bounds[1], unit, sign)}]"


def rank(score: Score | None) -> str:
    """`2`, or `2 (1 to 3)` where the tests leave other ranks open."""
    if score is None or score.rank is None:
        return ""
    low, high = score.ranks or (score.rank, score.rank)
    return f"{score.rank}" if low == high == score.rank else f"{score.rank} ({low} to {high})"


def matrix_cell(one: Contest, score: Score | None) -> str:
    return " ".join(part for part in (number(one, score), between(one, score.interval if score else None)) if part)


def leads(one: Contest, score: Score | None) -> bool:
    """Whether this is the best value of several."""
    return score is not None and score.rank == 1 and any(s is not None and s.rank not in (None, 1) for s in one.scores)


def _long(found: Board, one: Contest) -> Iterator[list[str]]:
    first = [f"{one.name}{', %' if one.share else ''}", {True: "↑", False: "↓", None: ""}[one.higher_is_better]]
    for name, score in zip(found.names, one.scores, strict=True):
        if score is None:
            yield [*first, name, "not run", "", "", ""]
        else:
            bounds = between(one, score.interval)
            yield [*first, name, number(one, score), bounds, rank(score), f"{one.documents:,}"]
        first = ["", ""]


def test_row(found: Board, one: Contest, test: PairTest) -> list[str]:
    """The cells of `tests_sheet`."""
    p, share = test.result, one.share and not test.nats
    return [
        one.name + (" (nats a document)" if test.nats else ", points" if share else ""),
        f"{found.names[test.b - 1]} against {found.names[test.a - 1]}",
        signed(p.difference, share),
        between(one, (p.ci_low, p.ci_high), sign=True, share=share),
        f"{p.wins:,} / {p.losses:,} / {p.ties:,}",
        p_value(p.p_value),
        p_value(test.p_adjusted),
        f"{p.n:,}",
    ]


def p_value(p: float) -> str:
    """Two significant digits and more where they matter: 0.031, 0.0002, 1."""
    return f"{p:.2g}" if p >= 0.0001 else f"{p:.1e}"
