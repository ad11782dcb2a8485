"""A comparison on the terminal: plain sentences and tables, and the verdict as the last line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.headline import changed_words, headline, parts_of_groups
from evalengine.report.compare.item_differences import KINDS
from evalengine.report.compare.metric_tables import MDE, cut_notes, metrics_table, p_words, pairing_notes, units
from evalengine.report.compare.regressions import regression_lines
from evalengine.report.compare.tables import (
    ROWS,
    answers_table,
    divergence_table,
    flips_table,
    logprobs_table,
    near_ties,
    no_distance,
    verdict,
)
from evalengine.report.terminal.tables import bullets

AGGREGATED = "No document's score changed, yet the reported results did: they were aggregated in another way."


def report(comparison: Comparison) -> Iterator[Table | str]:
    """Everything to print, in order; a string is one line."""
    c = comparison
    yield f"{headline(c)}."
    if c.verdict == "DIFFERENT":
        yield f"{changed_words(c)[0].upper()}{changed_words(c)[1:]}."
    for label, run in (("A", c.a), ("B", c.b)):
        yield f"{label}: {run.source} ({f'digest {run.digest[:12]}...' if run.digest else 'no digest'})"
    yield from bullets("Compared although they are unlike", c.unlike)
    yield from bullets("Settings that may change bits", c.settings)
    if c.verdict != "IDENTICAL":
        yield from bullets("Also different around the runs", c.surroundings)
    yield from bullets("Not known", c.unchecked)
    yield from bullets("Weights that differ", c.tensors)
    yield ""
    yield from regression_lines(c)
    yield from _summary(c)
    if c.logprobs is not None and c.logprobs.differing:
        yield logprobs_table(c.logprobs)
        yield from no_distance(c.logprobs)
    if c.divergences:
        yield divergence_table(c)
        yield from _rest(len(c.divergences), "diverging outputs")
        yield from near_ties(c)
    if c.flips:
        yield answers_table(c)
        yield flips_table(c)
        yield from _rest(len(c.flips), "changed answers")
    if c.verdict != "IDENTICAL" and c.metrics:
        inside = parts_of_groups(c)
        moved = [m for m in inside if m.paired is not None and m.paired.wins + m.paired.losses]
        yield metrics_table([m for m in c.metrics if m not in inside or m in moved])
        if len(moved) < len(inside):
            same = len(inside) - len(moved)
            yield f"{same} metrics of tasks in groups, whose documents score the same, are left out."
        yield f"W/L/T: {units(c.metrics)} on which B is better, worse and equal. {p_words(c.metrics)} {MDE}"
        yield from pairing_notes(c.metrics)
        yield from cut_notes(c.metrics, c.a, c.b)
    yield f"verdict: {verdict(c)}"


def differing_in(kinds: Mapping[str, int]) -> str:
    """How often each kind of difference between requests occurs: `16 in prompt, 11 in output`."""
    return ", ".join(f"{kinds[kind]} in {kind}" for kind in KINDS if kinds[kind])


def _summary(c: Comparison) -> Iterator[str]:
    parts = differing_in(c.kinds)
    yield f"{len(c.differences)} of {c.common} requests differ{f': {parts}' if parts else ''}."
    if c.partial:
        yield f"{c.only_a} requests are only in A and {c.only_b} only in B; they were left out."
    for cause, number in c.causes.items():
        yield f"Cause: {cause} ({number}): {'; '.join(c.why.get(cause, []))}."
    if c.rescored and not c.flips:
        yield AGGREGATED


def _rest(number: int, what: str) -> Iterator[str]:
    if number > ROWS:
        yield f"The first {ROWS} of {number} {what}; --json FILE holds them all."
