"""Many runs as a page: which of them are the same bits, every pair's verdict, and how far the others lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.matrix import (
    Matrix,
    Pair,
    change_text,
    distinguishing_settings,
    evidence,
    leading_metrics,
    look,
    run_notes,
    runs_table,
    score_text,
    setting_changes,
    setting_words,
    what_differs,
)
from evalengine.report.html import parts
from evalengine.report.html.comparison_page import GOOD, title
from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.numbers import counted

WORDS = {"IDENTICAL": "identical", "SAME TOKENS": "same tokens", "DIFFERENT": "different"}


def matrix_page(m: Matrix) -> Page:
    """A matrix of runs as a page, the verdict first."""
    page = Page(title(m.runs[0], str(len(m.runs))), eyebrow="Comparison")
    page.lead(parts.verdict(m.verdict, _sentence(m), _good(m)))
    if notes := run_notes(m.runs):
        page.lead(parts.listed(notes, "warnings"))
    command = parts.common_command(m.runs)
    note = None if command is None else ["All by ", tag("code", command), "."]
    origins = [(f"Run {n}", [tag("code", run.digest or "no digest"), parts.origin_line(run, command is None)])
               for n, run in enumerate(m.runs, 1)]  # fmt: skip
    runs = parts.details("Dates and digests; equal digests mean equal bits", parts.facts(origins))
    page.section("runs", "Runs", parts.sheet_table(runs_table(m.runs)), runs, note=note)
    page.section("matrix", "Run by run", _matrix(m), note=" ".join(_explained(m)))
    unequal = {pair: c for pair, c in sorted(m.pairs.items()) if c.verdict != "IDENTICAL"}
    if unequal:
        apart = distinguishing_settings(m.runs)
        rows = [_pair(pair, c, *apart) for pair, c in unequal.items()]
        head = ("Pair", "Settings", "Verdict", "Requests", "Outputs", "Answers", "Largest |Δ logprob|", "Cause")
        page.section("pairs", "Pairs that are not identical", parts.table(head, rows, numbers=(3, 4, 5, 6)))
    for name, pairs in ("Compared although they are unlike", m.unlike), ("Not comparable", m.refused):
        if pairs:
            why = [[tag("p", f"Runs {i} (A) and {j} (B):"), parts.listed(own)] for (i, j), own in sorted(pairs.items())]
            page.section(name.split()[0].lower(), name, *why)
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


def _matrix(m: Matrix) -> Node:
    names, values = distinguishing_settings(m.runs)
    key = next(iter(leading_metrics(m.runs)), None)

    def cell(i: int, j: int) -> Node:
        if i == j:
            return parts.cell("", score_text(m.runs[i - 1], key) if key else "·")
        c = m.pairs.get((min(i, j), max(i, j)))
        if c is None:
            return parts.cell("refused", "not comparable")
        word, counts = what_differs(c)
        scope = f"on {c.common:,} / {c.larger:,}" if c.partial else None  # on a separate line
        change = change_text(m.runs[j - 1], m.runs[i - 1], key) if key and not c.partial else ""  # row less column
        return parts.cell(look(c), word, scope, counts, change)

    return parts.matrix([setting_words(names, row) for row in values], cell)


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


def _pair(pair: Pair, c: Comparison, names: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    settings = setting_changes(names, *(values[number - 1] for number in pair)) or "the same"
    largest = "" if c.logprobs is None else c.logprobs.largest
    numbers = [f"{len(c.differences):,}", f"{c.outputs:,}", f"{c.changed:,}", largest]
    return [f"{pair[0]}\u00a0and\u00a0{pair[1]}", settings, WORDS[c.verdict], *numbers, ", ".join(c.causes)]
