"""Many runs as a page: which of them are the same bits, every pair's verdict, and how far the others lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from evalengine.report.compare import Comparison
from evalengine.report.html.comparison_page import GOOD, listed, title
from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import table, tiles, verdict
from evalengine.report.matrix import Matrix, Pair, evidence, run_notes, told_apart

WORDS = {"IDENTICAL": "identical", "SAME TOKENS": "same tokens", "DIFFERENT": "different"}
LOOKS = {"IDENTICAL": "same", "SAME TOKENS": "tokens", "DIFFERENT": "other"}  # classes of page.css


def matrix_page(m: Matrix) -> Page:
    """Everything that `compare --matrix` found, the verdict first."""
    page = Page(title(m.runs[0], str(len(m.runs))), eyebrow="Comparison")
    good = None if m.refused else GOOD.get(m.verdict)
    page.lead(verdict(m.verdict, f"{evidence(m)}.", good), tiles(_figures(m)))
    if notes := run_notes(m.runs):
        page.lead(tag("ul", *(tag("li", note) for note in notes), class_="warnings"))
    page.section("runs", "Runs", _runs(m), note="With the settings in which they are not all alike.")
    page.section("matrix", "Run by run", _matrix(m), note=" ".join(_explained(m)))
    if groups := list(_groups(m)):
        page.section("digests", "Digests", listed(groups), note="Equal digests mean equal bits.")
    unequal = {pair: c for pair, c in sorted(m.pairs.items()) if c.verdict != "IDENTICAL"}
    if unequal:
        rows = [_pair(pair, c) for pair, c in unequal.items()]
        head = ("Pair", "Verdict", "Requests", "Outputs", "Answers", "Largest |Δ logprob|", "Cause")
        page.section("pairs", "Pairs that are not identical", table(head, rows, numbers=(2, 3, 4, 5)))
    if m.unlike:
        page.section("unlike", "Compared although they are unlike", *_why(m.unlike))
    if m.refused:
        page.section("refused", "Not comparable", *_why(m.refused))
    return page


def _explained(m: Matrix) -> Iterator[str]:
    """What the numbers in the cells are."""
    yield "Requests that differ, of those that both runs hold."
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


def _runs(m: Matrix) -> Markup:
    names, values = told_apart(m.runs)
    rows = [
        [str(number), join(run.source.name, tag("code", (run.digest or "no digest")[:16], class_="under")), *settings]
        for number, (run, settings) in enumerate(zip(m.runs, values, strict=True), 1)
    ]
    return table(("", "Folder and digest", *names), rows)


def _matrix(m: Matrix) -> Markup:
    numbers = range(1, len(m.runs) + 1)
    rows = [[str(i), *(_cell(m, i, j) for j in numbers)] for i in numbers]
    return table(("", *map(str, numbers)), rows, class_="matrix")


def _cell(m: Matrix, i: int, j: int) -> Markup:
    if i == j:
        return tag("span", "·", class_="cell")
    c = m.pairs.get((min(i, j), max(i, j)))
    if c is None:
        return tag("span", "not comparable", class_="cell refused")
    count = None if c.verdict == "IDENTICAL" else tag("b", f"{len(c.differences):,} / {c.common:,} ")
    scope = tag("span", f"on {c.common:,} / {c.larger:,}") if c.partial else None  # a line of its own
    look = "tokens" if c.partial and c.verdict == "IDENTICAL" else LOOKS[c.verdict]  # less than identical runs
    return tag("span", count, WORDS[c.verdict], scope, class_=f"cell {look}")


def _groups(m: Matrix) -> Iterator[Markup]:
    for digest, members in m.groups():
        runs = f"{'Runs' if len(members) > 1 else 'Run'} {', '.join(map(str, members))}: "
        yield join(runs, tag("code", digest))


def _pair(pair: tuple[int, int], c: Comparison) -> list[str]:
    largest = "" if c.logprobs is None else c.logprobs.largest
    numbers = [f"{len(c.differences):,}", f"{c.outputs:,}", f"{sum(c.answers.values()):,}", largest]
    return [f"{pair[0]}\u00a0and\u00a0{pair[1]}", WORDS[c.verdict], *numbers, ", ".join(c.causes)]


def _why(pairs: Mapping[Pair, Sequence[str]]) -> Iterator[Markup]:
    for (i, j), why in sorted(pairs.items()):
        yield tag("p", f"Runs {i} (A) and {j} (B):")
        yield listed(why)
