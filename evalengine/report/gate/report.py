"""A gate's report, and its headline, which every form of the report has."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

from evalengine.plain_text import json_lines
from evalengine.report.gate.checks import DECIDED, Check
from evalengine.report.gate.plain_text import plain
from evalengine.report.gate.policies import INCONCLUSIVE, Inconclusive

Verdict = Literal["pass", "fail", "inconclusive", "error"]
# One colour for each verdict, wherever it is shown, so that an inconclusive one does not look like a pass.
STYLES: dict[Verdict, str] = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow",
                              "error": "bold magenta"}  # fmt: skip
SIGNS: dict[Verdict, str] = {"pass": "✅", "fail": "❌", "inconclusive": "🟡", "error": "🟣"}


@dataclass(frozen=True)
class Report:
    """The outcome of a gate. `problems` are sentences that say why it could not judge (verdict "error")."""

    verdict: Verdict
    policy: str
    description: str
    baseline: str
    run: str
    baseline_digest: str | None = None
    run_digest: str | None = None
    checks: tuple[Check, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # differences that the policy allows, answers that were not computed now
    warnings: tuple[str, ...] = ()  # what a reviewer must not miss
    trouble: str = "not comparable"  # the problems' title
    inconclusive: Inconclusive = "report"  # the policy's setting: what that verdict means for CI

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 2 not judged, 3 inconclusive (0 or 1 if the policy says so)."""
        if self.verdict == "inconclusive":
            return INCONCLUSIVE[self.inconclusive]
        return {"pass": 0, "fail": 1, "error": 2}[self.verdict]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    @property
    def undecided(self) -> list[Check]:
        return [check for check in self.checks if check.status == "undecided"]


def headline(report: Report) -> str:
    """The report on one line: `gate accuracy: INCONCLUSIVE (2 passed, 4 undecided)`."""
    return f"gate {plain(report.policy)}: {report.verdict.upper()} ({_counts(report)})"


def to_json(report: Report) -> str:
    """The report as JSON, ASCII only. Keys: the fields of `Report` and of `Check`, and `exit_code`."""
    return json_lines({**asdict(report), "exit_code": report.exit_code})


def _counts(report: Report) -> str:
    if report.verdict == "error":
        return plain(report.trouble)
    counts = Counter(check.status for check in report.checks)
    words = {"fail": "failed", "pass": "passed", "undecided": "undecided"}
    order = ("pass", "undecided") if report.verdict == "inconclusive" else ("fail", "pass", "undecided")
    parts = [f"{counts[status]} {words[status]}" for status in order if counts[status]]  # type: ignore[index]
    judged = sum(counts[status] for status in DECIDED)
    if report.verdict == "pass":
        return f"{judged} of {judged} checks"
    return ", ".join(parts)
