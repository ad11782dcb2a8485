"""Many runs as a page: which of them are the same bits, every pair's verdict, and how far the others lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.matrix import (
    Matrix,
    Pair,
    change_text,
    distinguishing_settings,
    evidence,
    leading_metrics,
    look,
    metric_name,
    run_notes,
    score_text,
    setting_changes,
    setting_words,
    what_differs,
)
from evalengine.report.html.comparison_page import GOOD, listed, title
from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import common_command, origin_line, table, tiles, verdict
from evalengine.report.numbers import counted

WORDS = {"IDENTICAL": "identical", "SAME TOKENS": "same tokens", "DIFFERENT": "different"}


def matrix_page(m: Matrix) -> Page:
    """A matrix of runs as a page, the verdict first."""
    page = Page(title(m.runs[0], str(len(m.runs))), eyebrow="Comparison")
    page.lead(verdict(m.verdict, _sentence(m), _good(m)), tiles(_figures(m)))
    if notes := run_notes(m.runs):
        page.lead(tag("ul", *(tag("li", note) for note in notes), class_="warnings"))
    command = common_command(m.runs)
    about = "With the settings in which they are not all alike, and their scores."
    note = about if command is None else join(f"{about} All by ", tag("code", command), ".")
    page.section("runs", "Runs", _runs(m, command is None), note=note)
    page.section("matrix", "Run by run", _matrix(m), note=" ".join(_explained(m)))
    if groups := list(_groups(m)):
        page.section("digests", "Digests", listed(groups), note="Equal digests mean equal bits.")
    unequal = {pair: c for pair, c in sorted(m.pairs.items()) if c.verdict != "IDENTICAL"}
    if unequal:
        apart = distinguishing_settings(m.runs)
        rows = [_pair(pair, c, *apart) for pair, c in unequal.items()]
        head = ("Pair", "Settings", "Verdict", "Requests", "Outputs", "Answers", "Largest |Δ logprob|", "Cause")
        page.section("pairs", "Pairs that are not identical", table(head, rows, numbers=(3, 4, 5, 6)))
    if m.unlike:
        page.section("unlike", "Compared although they are unlike", *_why(m.unlike))
    if m.refused:
        page.section("refused", "Not comparable", *_why(m.refused))
    return page


def _explained(m: Matrix) -> Iterator[str]:
    """Sentences on what the cells show."""
    yield "What differs, in how many of the requests that both runs hold. On the diagonal: each run's score."
    looks = {look(c) for c in m.pairs.values()}
    if "tokens" in looks:
        yield "Pale green: the same tokens, or equal bits where compared."
    if "some" in looks:
        yield "Yellow: results differ, but no metric by more than chance explains (paired tests, Holm, 5 %)."
    if "other" in looks:
        yield "Red: a metric differs by more than that, or no test can tell."
    if any(c.partial for c in m.pairs.values()):
        yield "On: the requests that both runs hold, of the larger one's; the others were left out."


def _figures(m: Matrix) -> Iterator[tuple[str, Child, Child]]:
    total = len(m.pairs) + len(m.refused)
    identical, shared = m.identical
    yield "Runs", f"{len(m.runs)}", f"{total:,} pairs"
    yield "Identical pairs", f"{identical:,}", f"{identical / total:.0%}" if total else None
    if shared:
        yield "Identical in part", f"{shared:,}", "pairs"
    yield "Digests", f"{len(m.groups())}", None
    if m.refused:
        yield "Not comparable", f"{len(m.refused):,}", "pairs"


def _runs(m: Matrix, commands: bool) -> Markup:
    """The table of runs. commands: whether each row has its run's own command."""
    names, values = distinguishing_settings(m.runs)
    metrics = leading_metrics(m.runs)
    titles = [metric_name(key, len(metrics) > 1) for key in metrics]
    rows = [
        [
            str(number),
            join(
                run.source.name,
                tag("code", (run.digest or "no digest")[:16], class_="under"),
                origin_line(run, commands),
            ),
            *settings,
            *(score_text(run, key) for key in metrics),
        ]
        for number, (run, settings) in enumerate(zip(m.runs, values, strict=True), 1)
    ]
    right = range(2 + len(names), 2 + len(names) + len(metrics))
    return table(("", "Run", *names, *titles), rows, numbers=right)


def _matrix(m: Matrix) -> Markup:
    numbers = range(1, len(m.runs) + 1)
    names, values = distinguishing_settings(m.runs)
    labels = [tag("span", setting_words(names, row), class_="setting") for row in values]
    rows = [[join(str(i), labels[i - 1]), *(_cell(m, i, j) for j in numbers)] for i in numbers]
    return table(("", *map(str, numbers)), rows, class_="matrix")


def _cell(m: Matrix, i: int, j: int) -> Markup:
    key = next(iter(leading_metrics(m.runs)), None)
    if i == j:
        return tag("span", tag("b", score_text(m.runs[i - 1], key)) if key else "·", class_="cell")
    c = m.pairs.get((min(i, j), max(i, j)))
    if c is None:
        return tag("span", "not comparable", class_="cell refused")
    word, counts = what_differs(c)
    scope = tag("span", f"on {c.common:,} / {c.larger:,}") if c.partial else None  # on a line of its own
    change = change_text(m.runs[j - 1], m.runs[i - 1], key) if key and not c.partial else ""  # row less column
    lines = [tag("span", text) for text in (counts, change) if text]
    return tag("span", tag("b", word), scope, *lines, class_=f"cell {look(c)}")


def _sentence(m: Matrix) -> str:
    """The numbers behind the verdict, and what they mean for the metrics."""
    calm = m.verdict == "DIFFERENT" and not any(look(c) == "other" for c in m.pairs.values())
    unlike = max((len(c.differences) for c in m.pairs.values()), default=0)
    same = m.verdict == "SAME TOKENS" and unlike
    note = " No metric changed by more than chance explains." if calm else ""
    if same:
        note = f" Every output is the same; logprobs differ in up to {counted(unlike, 'request')} of a pair."
    return f"{evidence(m)}.{note}"


def _good(m: Matrix) -> bool | None:
    """Whether the verdict is good news: False if a metric changed by more than chance explains, or no test can tell."""
    if m.refused or m.verdict != "DIFFERENT":
        return None if m.refused else GOOD.get(m.verdict)
    return False if any(look(c) == "other" for c in m.pairs.values()) else None


def _groups(m: Matrix) -> Iterator[Markup]:
    for digest, members in m.groups():
        runs = f"{'Runs' if len(members) > 1 else 'Run'} {', '.join(map(str, members))}: "
        yield join(runs, tag("code", digest))


def _pair(pair: Pair, c: Comparison, names: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    settings = setting_changes(names, *(values[number - 1] for number in pair)) or "the same"
    largest = "" if c.logprobs is None else c.logprobs.largest
    numbers = [f"{len(c.differences):,}", f"{c.outputs:,}", f"{c.changed:,}", largest]
    return [f"{pair[0]}\u00a0and\u00a0{pair[1]}", settings, WORDS[c.verdict], *numbers, ", ".join(c.causes)]


def _why(pairs: Mapping[Pair, Sequence[str]]) -> Iterator[Markup]:
    for (i, j), why in sorted(pairs.items()):
        yield tag("p", f"Runs {i} (A) and {j} (B):")
        yield listed(why)
