"""A gate's report on the terminal: a line per check, and what a reviewer must not miss."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from evalengine.report.gate.plain_text import plain
from evalengine.report.gate.report import STYLES, Report

CHECK_STYLES = {"pass": "green", "fail": STYLES["fail"], "undecided": STYLES["inconclusive"]}


def report_lines(report: Report, risk: bool = False) -> Iterator[Text]:
    """A line per check, its details below. No line begins with text from outside, which GitHub might obey.

    risk: whether P(loss > margin) is said of the checks that have one.
    """
    for check in report.checks:
        status = Text(f"{check.status.upper():<10}", style=CHECK_STYLES.get(check.status, "dim"))
        yield status + Text(f"{plain(check.label)}: {plain(check.message)}", style="default")
        for detail in check.details:
            yield Text(f"          - {plain(detail)}")
        if check.detects:
            yield Text(f"          {plain(check.detects)}", style="dim")
        if risk and check.risk is not None:
            yield Text(f"          P(loss > margin) = {check.risk:.2g}", style="dim")
    for note in report.notes:
        yield Text(f"not judged: {plain(note)}")
    if report.verdict == "fail" and report.checks:
        yield Text("what differs, and why: python -m evalengine compare BASELINE RUN")
    for warning in report.warnings:
        yield Text(f"WARNING {plain(warning)}", style=STYLES["inconclusive"])
