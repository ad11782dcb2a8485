"""A gate's report: its checks, its headline, and its forms: the terminal, Markdown (for a job's summary, a comment, a
pager), JUnit XML, JSON, and GitHub's workflow commands.

Names of tasks and metrics, and models' answers, come from others. Every form applies `plain` to them first, and so
holds no line break, terminal sequence, workflow command or character that XML forbids; and escapes for itself.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from rich.text import Text

from evalengine.errors import first_of
from evalengine.plain_text import json_lines, printable
from evalengine.report.gate.policies import INCONCLUSIVE, Inconclusive
from evalengine.util.sheet import Sheet, escaped, markdown_table

LONGEST = 400  # characters of one text from outside
SHOWN = 5  # requests or documents named in a check's details
SHOWN_NAMES = 3  # checks or runs named in the headline
# undecided: could not see the loss that the policy names. excused: not passed, but another rule of an any_of decides
Status = Literal["pass", "fail", "undecided", "skip", "excused"]
DECIDED: tuple[Status, ...] = ("pass", "fail", "undecided")  # the statuses of what was judged
Verdict = Literal["pass", "fail", "inconclusive", "error"]
# One colour for each verdict, wherever it is shown, so that an inconclusive one does not look like a pass.
STYLES: dict[Verdict, str] = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow",
                              "error": "bold magenta"}  # fmt: skip
# From the worst verdict to the best, as what became of a run.
OUTCOMES: dict[Verdict, str] = {"error": "could not be judged", "fail": "failed", "inconclusive": "inconclusive",
                                "pass": "passed"}  # fmt: skip
SIGNS: dict[Verdict, str] = {"pass": "✅", "fail": "❌", "inconclusive": "🟡", "error": "🟣"}


def plain(text: str, longest: int | None = LONGEST) -> str:
    """`printable` text of at most `longest` characters: the middle is omitted, since a check's p is at its end."""
    shown = printable(text)
    if longest is None or len(shown) <= longest:
        return shown
    tail = longest // 2
    return f"{shown[: longest - tail - 5]} ... {shown[-tail:]}"


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
    brief: str = ""  # the message in one short line; "" where it is one
    need: int | None = None  # documents with which an undecided check would pass if there is no loss; None: not known
    unit: str = ""  # of the next three: "points", "hundredths" of a metric beyond 0 to 1, "%" of the baseline, or ""
    loss: float | None = None  # the observed loss, positive if the run is worse
    bound: float | None = None  # larger losses are excluded at the policy's confidence; None: it is not finite
    margin: float | None = None  # the policy's; None: it has none
    cautions: tuple[str, ...] = ()  # why the bound may be too narrow

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.rule, self.task, self.name) if part)

    @property
    def text(self) -> str:
        """The message with its cautions."""
        return self.message + "".join(f"; caution: {why}" for why in self.cautions)

    @property
    def line(self) -> str:
        """The message in one short line, with its cautions."""
        return replace(self, message=self.brief or self.message).text

    @property
    def annotation(self) -> str:
        return " ".join((self.text, *self.details))

    @property
    def more(self) -> tuple[str, ...]:
        """The parts that it adds to the message and the cautions."""
        return (*self.details, *([self.detects] if self.detects else []))


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
    trouble: str | None = None  # the problems' title; None without problems
    inconclusive: Inconclusive = "report"  # the policy's setting: what that verdict means for CI
    compare: str = ""  # of a run that failed, the command that shows what differs, and why
    reports: tuple[Report, ...] = ()  # of a folder of several runs each one's; none where one run was judged

    @property
    def each(self) -> tuple[Report, ...]:
        """The report of each run that was judged."""
        return self.reports or (self,)

    @property
    def names(self) -> list[str]:
        """The name of each run that was judged: its path in the folder that contains them all."""
        paths = [report.run for report in self.each]
        if len({os.path.isabs(path) for path in paths}) > 1:  # an experiment's file may list a run elsewhere
            return paths
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        return [str(Path(path).relative_to(folder)) for path in paths]

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 2 not judged, 3 inconclusive (0 or 1 if the policy says so)."""
        if self.verdict == "inconclusive":
            return INCONCLUSIVE[self.inconclusive]
        return {"pass": 0, "fail": 1, "error": 2}[self.verdict]

    @property
    def ordered(self) -> list[Check]:
        """The checks, those first that need a reader."""
        return sorted(self.checks, key=lambda check: [*MARKS].index(check.status))

    def of(self, status: Status) -> list[Check]:
        """The checks with this status."""
        return [check for check in self.checks if check.status == status]


def together(run: str, reports: Sequence[Report]) -> Report:
    """The report of a folder of several runs: its verdict is the worst of theirs, which comes first."""
    ordered = sorted(reports, key=lambda report: [*OUTCOMES].index(report.verdict))
    worst, warnings = ordered[0], dict.fromkeys(warning for report in reports for warning in report.warnings)
    return Report(
        worst.verdict, worst.policy, worst.description, worst.baseline, run, warnings=tuple(warnings),
        inconclusive=worst.inconclusive, reports=tuple(replace(report, warnings=()) for report in ordered),
    )  # fmt: skip


def headline(report: Report) -> str:
    """The verdict and its reason on one line: `gate accuracy: INCONCLUSIVE: no check failed; 4 of 6 are undecided`."""
    return f"gate {plain(report.policy)}: {report.verdict.upper()}{reason(report)}"


def reason(report: Report) -> str:
    """The reason as it follows the verdict on its line, with its colon or brackets."""
    if report.reports:
        by = {verdict: [plain(name) for name, one in zip(report.names, report.reports, strict=True)
                        if one.verdict == verdict] for verdict in OUTCOMES}  # fmt: skip
        decide = by.pop(report.verdict)
        if report.verdict == "pass":
            return f" ({len(decide)} of {len(report.reports)} runs)"
        others = "".join(f"; {len(names)} {OUTCOMES[verdict]}" for verdict, names in by.items() if names)
        named = "; ".join(first_of(decide, SHOWN_NAMES))
        return f": {len(decide)} of {len(report.reports)} runs {OUTCOMES[report.verdict]} ({named}){others}"
    failed, undecided = report.of("fail"), report.of("undecided")
    judged = len(failed) + len(undecided) + len(report.of("pass"))
    if report.verdict == "error":
        return f" ({plain(report.trouble or '')})"
    if report.verdict == "pass":
        return f" ({judged} of {judged} checks)"
    if report.verdict == "fail":
        named = "; ".join(first_of([plain(check.label) for check in failed], SHOWN_NAMES))
        left = f"; {len(undecided)} undecided" if undecided else ""
        return f": {len(failed)} of {judged} checks failed ({named}){left}"
    needs = [check.need for check in undecided if check.need is not None]
    why = "are undecided"
    if len(needs) == len(undecided):
        why = f"have too few documents (largest need: about {max(needs):,})"
    return f": no check failed; {len(undecided)} of {judged} {why}"


def to_json(report: Report) -> str:
    """The report as JSON, ASCII only. Keys: the fields of `Report` and of `Check`, and `exit_code`; `reports` where
    several runs were judged."""
    return json_lines(_as_json(report))


def _as_json(report: Report) -> dict[str, Any]:
    values = {**asdict(report), "exit_code": report.exit_code, "reports": [*map(_as_json, report.reports)]}
    return values if report.reports else {name: value for name, value in values.items() if name != "reports"}


CHECK_STYLES = {"pass": "green", "fail": STYLES["fail"], "undecided": STYLES["inconclusive"]}
SUMMARY_LENGTH = 250_000  # characters, 4 bytes each at most: GitHub refuses summaries above 1 MiB
# Checks that need a reader come first.
MARKS: dict[Status, str] = {"fail": "❌ fail", "undecided": "🟡 undecided", "excused": "➖ excused", "skip": "➖ skip",
                            "pass": "✅ pass"}  # fmt: skip
PROPERTIES = ("verdict", "baseline", "run", "baseline_digest", "run_digest")  # of a suite in JUnit
ANNOTATIONS = 10  # GitHub shows ten errors and ten warnings a step, and drops the rest
# Tags in JUnit. An undecided check is no `<error>`: the gate did judge.
TAGS: dict[Status, str] = {"fail": "failure", "pass": "system-out"}
JUNIT_WORDS: dict[Status, str] = {"undecided": "undecided: ", "excused": "another rule of any_of decides: "}
UNDECIDED_COMMAND = {"fail": "error", "report": "warning", "pass": "notice"}  # by the policy's `inconclusive`


def report_lines(report: Report, risk: bool = False, verbose: bool = False) -> Iterator[Text]:
    """The headline, then a line per check, failed ones first. No line begins with text from outside, which GitHub might
    obey.

    Several runs have a line each, with the verdict and its reason. risk: show P(loss > margin) of the checks that have
    one. verbose: show all that a check saw, the skipped checks, and the checks of each of several runs.
    """
    yield Text(headline(report), style=STYLES[report.verdict])
    for name, run in zip(report.names, report.reports, strict=True) if report.reports else ():
        status = Text(f"{run.verdict.upper():<13}", style=STYLES[run.verdict])
        problems = [plain(problem.removeprefix(f"{run.run}: ").replace(f"{run.run}/", "")) for problem in run.problems]
        problems = first_of(problems, len(problems) if verbose else 1)
        why = f": {'; '.join(problems)}" if problems else ""
        yield status + Text(f"{plain(name)}{reason(run)}{why}", style="default")
        yield from _run_lines(run, risk, verbose) if verbose else ()
    yield from _run_lines(report, risk, verbose)
    if report.reports and not verbose:
        yield Text("--verbose lists the checks of each run", style="dim")
    if command := next((run.compare for run in report.each if run.compare), ""):
        yield Text(f"what differs, and why: {plain(command, None)}")
    for warning in report.warnings:
        yield Text(f"WARNING {plain(warning)}", style=STYLES["inconclusive"])


def _run_lines(report: Report, risk: bool, verbose: bool) -> Iterator[Text]:
    """The checks and notes of one run."""
    checks = report.ordered
    skipped = sum(check.status == "skip" for check in checks)
    for check in checks if verbose else [check for check in checks if check.status != "skip"]:
        status = Text(f"{check.status.upper():<10}", style=CHECK_STYLES.get(check.status, "dim"))
        yield status + Text(f"{plain(check.label)}: {plain(check.text if verbose else check.line)}", style="default")
        for detail in check.details if verbose or check.status == "fail" or not check.brief else ():
            yield Text(f"          - {plain(detail)}")
        if check.detects and (verbose or not check.brief):
            yield Text(f"          {plain(check.detects)}", style="dim")
        if risk and check.risk is not None:
            yield Text(f"          P(loss > margin) = {check.risk:.2g}", style="dim")
    if skipped and not verbose:
        yield Text(f"{skipped} not judged; --verbose lists them, and what each check saw", style="dim")
    for note in report.notes:
        yield Text(f"note: {plain(note)}")


def markdown(report: Report) -> str:
    """Headline, warnings, problems, a table of checks (what failed or was undecided first), then what each saw; of
    several runs this for each."""
    lines = [f"### {SIGNS[report.verdict]} {_shown(headline(report))}", ""]
    lines += [f"**⚠️ {_shown(warning)}**\n" for warning in report.warnings]
    lines += [f"The policy requires: {_shown(report.description)}\n"] if report.description else []
    lines += [f"- baseline: {_shown(report.baseline)}", f"- run: {_shown(report.run)}"]
    for name, run in zip(report.names, report.each, strict=True):
        heading = f"{SIGNS[run.verdict]} {run.verdict.upper()} {_shown(f'{name}{reason(run)}')}"
        lines += [f"\n#### {heading}\n"] if report.reports else []
        lines += [f"- note: {_shown(note)}" for note in run.notes]
        lines += [f"\n**{_shown((run.trouble or '').capitalize())}**\n"] if run.problems else []
        lines += [f"- {_shown(problem)}" for problem in run.problems]
        checks = run.ordered
        rows = [(MARKS[check.status], *map(plain, (check.rule, check.task, check.name, check.text)))
                for check in checks]  # fmt: skip
        table = markdown_table(Sheet("", ("", "rule", "task", "metric", "result"), rows, range(5)))
        lines += ["", *table.split("\n"), ""] if checks else []
        lines += [f"- {_shown(check.label)}: {_shown(text)}" for check in checks for text in check.more]
    ends = [*accumulate(len(line) + 1 for line in lines)]
    shown = bisect_right(ends, SUMMARY_LENGTH)
    lines[shown:] = [f"\n{len(lines) - shown} more lines are not shown."] if shown < len(lines) else []
    return "\n".join(lines).rstrip() + "\n\n"


def _shown(text: str) -> str:
    return escaped(plain(text))


def junit(report: Report) -> str:
    """JUnit XML as GitLab and Jenkins read it: a suite per run, a test case per check; one with `<error>` per
    problem."""
    suites = [_suite(run, report) for run in report.each]
    names = [name for name in suites[0].attrib if name != "name"]
    counts = {name: str(sum(int(suite.attrib[name]) for suite in suites)) for name in names}
    root = ElementTree.Element("testsuites", {"name": "evalengine gate", **counts})
    root.extend(suites)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(report: Report, whole: Report) -> ElementTree.Element:
    """One run's suite. A test's class names the run where `whole` has several: GitLab takes two of one name for one."""
    names, trouble = ("gate", report.policy, *([report.run] if whole.reports else [])), plain(report.trouble or "")
    cases: list[tuple[str, str, str, dict[str, str], str]] = []  # (task, name, tag, the tag's attributes, its text)
    for check in report.checks:
        failed = check.status == "undecided" and report.inconclusive == "fail"
        tag = "failure" if failed else TAGS.get(check.status, "skipped")
        message = plain(f"{JUNIT_WORDS.get(check.status, '')}{check.text}")
        kind = check.rule if check.status == "fail" else check.status
        attributes = {"message": message, "type": kind} if check.status != "pass" else {}
        text = "\n".join(map(plain, (check.text, *check.more)))
        cases.append((check.task, f"{check.rule} {check.name}".strip(), tag, attributes, text))
    for number, problem in enumerate(report.problems, 1):
        attributes = {"message": plain(problem), "type": trouble}
        name = trouble if len(report.problems) == 1 else f"{trouble} {number}"
        cases.append(("", name, "error", attributes, plain(problem, None)))
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {count: str(sum(case[2] == tag for case in cases)) for count, tag in tags.items()}
    title = " ".join(plain(name) for name in ("evalengine", *names))
    suite = ElementTree.Element("testsuite", {"name": title, "tests": str(len(cases)), **counts, "time": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    said = [(name, str(getattr(report, name) or "")) for name in PROPERTIES]
    said += [("warning", warning) for warning in whole.warnings] + [("note", note) for note in report.notes]
    for name, value in said:
        ElementTree.SubElement(properties, "property", name=name, value=plain(value))
    for task, name, tag, attributes, text in cases:
        class_name = ".".join(plain(part) for part in (*names, task) if part)
        case = ElementTree.SubElement(suite, "testcase", classname=class_name, name=plain(name), time="0")
        ElementTree.SubElement(case, tag, attributes).text = text
    return suite


def workflow_commands(report: Report) -> Iterator[str]:
    """GitHub's workflow commands, a line each: `::error title=...::message`, and `::warning` and `::notice`."""
    yield from (_command("warning", report, "", warning) for warning in report.warnings)
    errors: list[tuple[str, str]] = []  # (title, message)
    undecided: list[tuple[str, str]] = []
    for name, run in zip(report.names, report.each, strict=True):
        of_run = f"{name}: " if report.reports else ""
        errors += [(f"{of_run}{run.trouble}", problem) for problem in run.problems]
        errors += [(f"{of_run}{check.label}", check.annotation) for check in run.of("fail")]
        undecided += [(f"{of_run}undecided: {check.label}", check.annotation) for check in run.of("undecided")]
    kinds = (("error", "failed", errors), (UNDECIDED_COMMAND[report.inconclusive], "undecided", undecided))
    for kind, status, messages in kinds:
        if (more := len(messages) - ANNOTATIONS + 1) > 1:
            messages[ANNOTATIONS - 1 :] = [("", f"and {more} more {status} checks")]
        yield from (_command(kind, report, title, message) for title, message in messages)


def _command(kind: str, report: Report, title: str, message: str) -> str:
    """One command, escaped as https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts does it."""
    title, message = (plain(text).replace("%", "%25") for text in (f"gate {report.policy}: {title}", message))
    return f"::{kind} title={title.removesuffix(': ').replace(':', '%3A').replace(',', '%2C')}::{message}"
