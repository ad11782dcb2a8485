"""Different models on the same tasks as a page: who leads and whether that is chance, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evalengine.report.html.comparison_page import listed
from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.html.origin import origin_line
from evalengine.report.html.page import Page
from evalengine.report.html.parts import counted, details, facts, row_of, table, tiles, verdict
from evalengine.report.html.plots import interval
from evalengine.report.leaderboard import sheets
from evalengine.report.leaderboard.board import Contest, PairTest, Score
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.history import curves, history_plot, is_history
from evalengine.report.leaderboard.means import Group

OPEN = 6  # metrics shown in full; further ones are folded
PARTS = 12  # of a group, shown unfolded
TILES = 3  # metrics in the first figures


def leaderboard_page(found: Board, history: bool = False) -> Page:
    """Everything that the comparison holds. history: show the curves even where the models name no steps."""
    page = Page(_title(found), eyebrow="Models compared")
    page.lead(verdict(_word(found), f"{sheets.verdict(found)}.", None), tiles(_figures(found)))
    page.section("metrics", "Metrics", *_metrics(found), note=sheets.ranks_note(found) or None)
    if (history or is_history(found)) and (drawn := curves(found)):
        plots = row_of(*(tag("figure", history_plot(found, one)) for one in drawn))
        page.section("history", "History", plots, note="Bands and whiskers are 95 % intervals over documents.")
    if found.groups:
        page.section("groups", "Groups and subjects", *(_group(found, one) for one in found.groups))
    if found.family:
        page.section("tests", "Paired tests", *_tests(found), note=sheets.tests_note(found))
    if found.notes:
        page.section("notes", "Notes", listed(found.notes))
    page.section("models", "Models", facts(_models(found)))
    return page


def _title(found: Board) -> str:
    tasks = list(dict.fromkeys(one.key[0] for one in found.contests)) + [one.name for one in found.groups]
    what = ", ".join(tasks) if 0 < len(tasks) <= 3 else counted(len(tasks), "task")
    return f"{len(found.runs)} models on {what}"


def _word(found: Board) -> str:
    """The headline: what is surely better, if anything is."""
    sure = [one for one in found.tested if _surely_first(one)]
    if sure:
        return f"Best: {sheets.leader(found, sure[0])}" + (f", and {len(sure) - 1} more" if len(sure) > 1 else "")
    if not found.family:
        return "No pair of models could be tested"
    return "Some differences are significant" if found.significant else "No difference is significant"


def _surely_first(one: Contest) -> bool:
    """Whether one model significantly beats every other."""
    return any(score is not None and score.ranks == (1, 1) for score in one.scores)


def _figures(found: Board) -> Iterator[tuple[str, Child, Child]]:
    for one in found.tested[:TILES]:
        first = [n for n, score in enumerate(one.scores) if score is not None and score.rank == 1]
        if first:
            names = " and ".join(found.names[n] for n in first[:2]) + (", ..." if len(first) > 2 else "")
            yield one.name, sheets.value_with_unit(one, one.scores[first[0]]), names
    yield "Models", f"{len(found.runs)}", None
    yield "Significant differences", f"{found.significant:,}", f"of {found.family:,} tests, at {sheets.PERCENT}"


def _metrics(found: Board) -> Iterator[Markup]:
    shown = [_contest(found, one) for one in found.tested]
    yield from (part for parts in shown[:OPEN] for part in parts)
    if rest := shown[OPEN:]:
        yield details(f"{counted(len(rest), 'more metric')}", *(part for parts in rest for part in parts))


def _contest(found: Board, one: Contest) -> list[Markup]:
    bounds = _bounds(one)
    rows = [_score(found, one, n, score, bounds) for n, score in enumerate(one.scores)]
    title = tag("h3", f"{sheets.titled(one)} · {counted(one.documents, 'document')}")
    return [title, table(("Model", "Value", "Rank", "95 % interval", ""), rows, numbers=(1, 2, 3))]


def _score(
    found: Board, one: Contest, place: int, score: Score | None, bounds: tuple[float, float]
) -> list[Markup | str | None]:
    name = tag("span", found.names[place], class_="name")
    if score is None:
        return [name, "not run", "", "", None]
    drawn = None
    if score.interval is not None:
        drawn = interval(score.value, *score.interval, bounds)
    value = sheets.number(one, score)
    best = tag("strong", value) if sheets.leads(one, score) else value
    return [name, best, sheets.rank(score), sheets.between(one, score.interval), drawn]


def _bounds(one: Contest) -> tuple[float, float]:
    """The scale that a metric's intervals share."""
    ends = [end for s in one.scores if s is not None and s.interval is not None for end in (*s.interval, s.value)]
    if not ends:
        return 0.0, 1.0
    low, high = min(ends), max(ends)
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def _group(found: Board, one: Group) -> Markup:
    sheet = sheets.group_sheet(found, one)
    rows: list[list[Child]] = [
        [tag("strong", cell) if (number, n) in sheet.best else cell for n, cell in enumerate(row)]
        for number, row in enumerate(sheet.rows)
    ]
    body = table(sheet.head, rows, numbers=range(1, len(sheet.head)))
    note = tag("p", sheet.note, class_="note")
    return tag("details", tag("summary", sheet.title), body, note, open=len(one.parts) <= PARTS)


def _tests(found: Board) -> Iterator[Markup]:
    for one in found.tested:
        if not one.tests:
            continue
        ends = [abs(e) for t in one.tests for e in (t.result.ci_low, t.result.ci_high) if math.isfinite(e)]
        reach = max(ends, default=0.0) or 1.0
        yield tag("h3", f"{sheets.titled(one)}{'; differences in points' if one.share else ''}")
        head = ("B against A", "B − A", "p", "p (Holm)", "95 % interval", "", "Won / lost / equal")
        yield table(head, [_test(found, one, test, reach) for test in one.tests], numbers=(1, 2, 3, 4, 6))


def _test(found: Board, one: Contest, test: PairTest, reach: float) -> Sequence[Markup | str | None]:
    _, _, difference, bounds, counts, p, adjusted, _ = sheets.test_row(found, one, test)
    against = tag("span", f"against {found.names[test.a - 1]}", class_="under name")
    pair = join(tag("span", found.names[test.b - 1], class_="name"), against)
    result, drawn = test.result, None
    if math.isfinite(result.ci_low) and math.isfinite(result.ci_high):
        drawn = interval(result.difference, result.ci_low, result.ci_high, (-reach, reach), rule=0)
    holm = tag("strong", adjusted) if test.significant else adjusted
    unit = " nat" if test.nats else ""
    return [pair, f"{difference}{unit}", p, holm, bounds, drawn, counts]


def _models(found: Board) -> Iterator[tuple[str, Child]]:
    for place, (run, name) in enumerate(zip(found.runs, found.names, strict=True)):
        step = f"step {found.steps[place]:,}, " if found.steps is not None else ""
        digest = tag("code", run.digest or "no digest", class_="under")
        yield name, join(f"{step}{run.source}", digest, origin_line(run))
