"""A gate's report as a page: the verdict and its reason, then every check with its loss, bound and margin."""

from __future__ import annotations

import math
from collections.abc import Iterator

from evalengine.report.gate.report import Check, Report, headline, plain, reason
from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, facts, interval, listed, table, verdict
from evalengine.report.numbers import counted, shown

HEAD = ("Verdict", "Check", "Loss", "Bound", "Margin", "-2 to 2 margins")
ABOUT = {
    "Loss": "Of the run against the baseline, negative where the run is better",
    "Bound": "The largest loss that the documents do not exclude",
    "-2 to 2 margins": "From the loss to its bound; dashed: the margin. Values outside are drawn at the edge",
}
GOOD = {"pass": True, "fail": False}
MOODS = {"pass": "mark good", "fail": "mark bad"}


def gate_page(report: Report) -> Page:
    """The page of one run's gate, or of that of several runs, with a section for each."""
    page = Page(f"Gate {plain(report.policy)}", eyebrow="Gate")
    requirement = f"The policy requires: {report.description}" if report.description else None
    warnings = listed(report.warnings, "warnings") if report.warnings else None
    page.lead(verdict(headline(report), requirement, GOOD.get(report.verdict)), warnings)
    if not report.reports:
        page.section("checks", "Checks" if report.checks else "Problems", *_run(report))
        return page
    numbered = [*enumerate(zip(report.names, report.reports, strict=True), 1)]
    rows: list[list[Node]] = [
        [run.verdict.upper(), tag("a", name, href=f"#run-{number}"), reason(run).lstrip(": ")]
        for number, (name, run) in numbered
    ]
    page.section("runs", "Runs", table(("Verdict", "Run", "Reason"), rows))
    for number, (name, run) in numbered:
        page.section(f"run-{number}", name, *_run(run), note=f"{run.verdict.upper()}{reason(run)}")
    return page


def _run(report: Report) -> Iterator[Node]:
    """The problems, checks and notes of one run, and the two runs' names and digests."""
    if report.problems:
        yield tag("h3", (report.trouble or "").capitalize())
        yield listed(report.problems)
    if report.checks:
        width = len(HEAD) if any(check.loss is not None for check in report.checks) else 2
        rows = [_row(check)[:width] for check in report.ordered if check.status != "skip"]
        yield table(HEAD[:width], rows, numbers=(2, 3, 4), about=ABOUT)
        saw = [(check.label, listed([f"{check.status}: {check.message}", *check.more])) for check in report.ordered]
        skipped = sum(check.status == "skip" for check in report.checks)
        left = f"; {skipped} not judged" if skipped else ""
        yield details(f"What {counted(len(saw) - skipped, 'check')} saw{left}", facts(saw))
    if report.notes:
        yield tag("h3", "Notes")
        yield listed(report.notes)
    sources = ("Baseline", report.baseline, report.baseline_digest), ("Run", report.run, report.run_digest)
    yield facts((name, ["/".join(source.split("/")[-2:]), digest and tag("code", digest, class_="under")])
                for name, source, digest in sources)  # fmt: skip


def _row(check: Check) -> list[Node]:
    what = [check.label, tag("span", check.line, class_="under")]
    drawn = None
    if check.margin and check.loss is not None and check.bound is not None:
        drawn = interval(check.loss, check.loss, check.bound, (-2 * check.margin, 2 * check.margin), rule=check.margin)
    bound = None if check.bound is None else math.ceil(100 * check.bound - 1e-9) / 100
    figures = [f"{shown(x, '.2f')} {check.unit}" if x is not None else "" for x in (check.loss, bound, check.margin)]
    return [tag("span", check.status, class_=MOODS.get(check.status)), what, *figures, drawn]
