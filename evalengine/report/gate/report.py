"""A gate's report: its checks, and its headline, which every form of the report has.

Names of tasks and metrics, and models' answers, come from others. Every form applies `plain` to them first, and so
holds no line break, terminal sequence, workflow command or character that XML forbids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from evalengine.errors import first_of
from evalengine.plain_text import json_lines, printable
from evalengine.report.gate.policies import INCONCLUSIVE, Inconclusive
from evalengine.report.read.run import Key

LONGEST = 400  # characters of one text from outside
SHOWN = 5  # requests or documents named in a check's details
# undecided: could not see the loss that the policy names. excused: not passed, but another rule of an any_of decides
Status = Literal["pass", "fail", "undecided", "skip", "excused"]
DECIDED: tuple[Status, ...] = ("pass", "fail", "undecided")  # the statuses of what was judged
Verdict = Literal["pass", "fail", "inconclusive", "error"]
# One colour for each verdict, wherever it is shown, so that an inconclusive one does not look like a pass.
STYLES: dict[Verdict, str] = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow",
                              "error": "bold magenta"}  # fmt: skip
SIGNS: dict[Verdict, str] = {"pass": "✅", "fail": "❌", "inconclusive": "🟡", "error": "🟣"}


def plain(text: str, longest: int | None = LONGEST) -> str:
    """`printable` text, cut at `longest`."""
    shown = printable(text)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."


@dataclass(frozen=True)
class Check:
    """One verdict. Texts are plain, and may hold what a model or a task's author wrote: escape them."""

    rule: str  # digest | tokens | accuracy
    task: str
    name: str  # "metric,filter", or "" for the whole task
    status: Status
    message: str
    details: tuple[str, ...] = ()
    detects: str = ""  # the least change that this check would have seen, or the losses that it excludes
    risk: float | None = None  # P(loss > margin) (`LossBound.p_beyond`); None without a margin, or with one cluster

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.rule, self.task, self.name) if part)


def first(keys: Iterable[Key], what: str = "", more: Mapping[Key, str] | None = None) -> Iterator[str]:
    """The first requests as details of a check, a line each. what: the line's beginning. more: its end, by key."""
    lines = [f"document {key[1]}, request {key[2]}, repeat {key[3]}{(more or {}).get(key, '')}" for key in keys]
    return (f"{what}{line}" for line in first_of(lines, SHOWN))


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
