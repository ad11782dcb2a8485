"""A gate's report: its checks, its headline, and its forms: the terminal, Markdown (for a job's summary, a comment, a
pager), JUnit XML, JSON, and GitHub's workflow commands.

Names of tasks and metrics, and models' answers, come from others. Every form applies `plain` to them first, and so
holds no line break, terminal sequence, workflow command or character that XML forbids; and escapes for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from rich.text import Text

from evalengine.errors import first_of
from evalengine.plain_text import json_lines, printable
from evalengine.report.gate.policies import INCONCLUSIVE, Inconclusive
from evalengine.report.read.run import Key
from evalengine.util.sheet import escaped

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
        return self.cautioned(self.message)

    @property
    def line(self) -> str:
        """The message in one short line, with its cautions."""
        return self.cautioned(self.brief or self.message)

    def cautioned(self, text: str) -> str:
        return text + "".join(f"; caution: {why}" for why in self.cautions)

    @property
    def more(self) -> tuple[str, ...]:
        """The parts that it adds to the message and the cautions."""
        return (*self.details, *([self.detects] if self.detects else []))


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
        return sorted(self.checks, key=lambda check: ORDER.index(check.status))

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    @property
    def undecided(self) -> list[Check]:
        return [check for check in self.checks if check.status == "undecided"]


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
    judged = sum(check.status in DECIDED for check in report.checks)
    undecided = report.undecided
    if report.verdict == "error":
        return f" ({plain(report.trouble or '')})"
    if report.verdict == "pass":
        return f" ({judged} of {judged} checks)"
    if report.verdict == "fail":
        failed = first_of([plain(check.label) for check in report.failures], SHOWN_NAMES)
        left = f"; {len(undecided)} undecided" if undecided else ""
        return f": {len(report.failures)} of {judged} checks failed ({'; '.join(failed)}){left}"
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
MARKS: dict[Status, str] = {"fail": "❌ fail", "undecided": "🟡 undecided", "excused": "➖ excused", "skip": "➖ skip",
                            "pass": "✅ pass"}  # fmt: skip
ORDER = tuple(MARKS)  # checks that need a reader come first
PROPERTIES = ("verdict", "baseline", "run", "baseline_digest", "run_digest")  # of a suite in JUnit
ANNOTATIONS = 10  # GitHub shows ten errors and ten warnings a step, and drops the rest
# How an undecided check is reported, by the policy's `inconclusive`. It is no `<error>`: the gate did judge.
UNDECIDED_TAG = {"fail": "failure", "report": "skipped", "pass": "skipped"}
UNDECIDED_COMMAND = {"fail": "error", "report": "warning", "pass": "notice"}


def report_lines(report: Report, risk: bool = False, verbose: bool = False) -> Iterator[Text]:
    """The headline, then a line per check, failed ones first. No line begins with text from outside, which GitHub might
    obey.

    Of several runs a line for each, with the verdict and its reason. risk: whether P(loss > margin) is said of the
    checks that have one. verbose: whether all that a check saw is said, and of the parts of groups what became of them;
    of several runs, the checks of each.
    """
    yield Text(headline(report), style=STYLES[report.verdict])
    for name, run in zip(report.names, report.reports, strict=True) if report.reports else ():
        status = Text(f"{run.verdict.upper():<13}", style=STYLES[run.verdict])
        told = [plain(problem.removeprefix(f"{run.run}: ").replace(f"{run.run}/", "")) for problem in run.problems]
        problems = first_of(told, len(told) if verbose else 1)
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
    lines += [f"The policy asks for: {_shown(report.description)}\n"] if report.description else []
    lines += [f"- baseline: {_shown(report.baseline)}", f"- run: {_shown(report.run)}"]
    length = shown = 0
    for name, run in zip(report.names, report.each, strict=True):
        heading = f"\n#### {SIGNS[run.verdict]} {run.verdict.upper()} {_shown(f'{name}{reason(run)}')}\n"
        section = [*([heading] if report.reports else []), *_run_markdown(run, SUMMARY_LENGTH // len(report.each))]
        length += sum(map(len, section))
        if shown and length > SUMMARY_LENGTH:
            break
        lines += section
        shown += 1
    if shown < len(report.each):
        lines += [f"\n{len(report.each) - shown} more runs are not shown."]
    return "\n".join(lines).rstrip() + "\n\n"


def _run_markdown(report: Report, room: int) -> Iterator[str]:
    """The notes, problems and checks of one run. room: characters of the checks."""
    yield from (f"- note: {_shown(note)}" for note in report.notes)
    if report.problems:
        yield from ("", f"**{_shown((report.trouble or '').capitalize())}**", "")
        yield from (f"- {_shown(problem)}" for problem in report.problems)
    if report.checks:
        yield ""
        yield from _table(report.ordered, room)


def _shown(text: str) -> str:
    return escaped(plain(text))


def _table(checks: Sequence[Check], room: int) -> Iterator[str]:
    """The table, then the details of checks that have some, in `room` characters: GitHub has a limit."""
    yield "| | rule | task | metric | result |"
    yield "|---|---|---|---|---|"
    length = shown = 0
    below: list[str] = []
    for check in checks:
        cells = (check.rule, check.task, check.name, check.text)
        row = f"| {MARKS[check.status]} | {' | '.join(map(_shown, cells))} |"
        more = [f"- {_shown(check.label)}: {_shown(text)}" for text in check.more]
        length += len(row) + sum(map(len, more))
        if length > room:
            break
        yield row
        below += more
        shown += 1
    if shown < len(checks):
        yield f"\n{len(checks) - shown} more checks are not shown."
    yield from ("", *below)


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
    names = ("gate", report.policy, *([report.run] if whole.reports else []))
    cases = [_case(report, check, (*names, check.task)) for check in report.checks]
    trouble = plain(report.trouble or "")
    for number, problem in enumerate(report.problems, 1):
        name = f"{trouble} {number}" if len(report.problems) > 1 else trouble
        case = ElementTree.Element("testcase", classname=_class(names), name=name, time="0")
        error = ElementTree.SubElement(case, "error", message=plain(problem), type=trouble)
        error.text = plain(problem, None)
        cases.append(case)
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {count: str(sum(case.find(tag) is not None for case in cases)) for count, tag in tags.items()}
    title = " ".join(plain(name) for name in ("evalengine", *names))
    suite = ElementTree.Element("testsuite", {"name": title, "tests": str(len(cases)), **counts, "time": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    said = [(name, str(getattr(report, name) or "")) for name in PROPERTIES]
    said += [("warning", warning) for warning in whole.warnings] + [("note", note) for note in report.notes]
    for name, value in said:
        ElementTree.SubElement(properties, "property", name=name, value=plain(value))
    suite.extend(cases)
    return suite


def workflow_commands(report: Report) -> Iterator[str]:
    """GitHub's workflow commands, a line each: `::error title=...::message`, and `::warning` and `::notice`."""
    for warning in report.warnings:
        yield f"::warning title={_property(f'gate {report.policy}')}::{_data(warning)}"
    errors, undecided = [], []
    for name, run in zip(report.names, report.each, strict=True):
        of_run = f"{name}: " if report.reports else ""
        errors += [(f"{of_run}{run.trouble}", problem) for problem in run.problems]
        errors += [(f"{of_run}{check.label}", _message(check)) for check in run.failures]
        undecided += [(f"{of_run}undecided: {check.label}", _message(check)) for check in run.undecided]
    yield from _commands("error", report, errors)
    yield from _commands(UNDECIDED_COMMAND[report.inconclusive], report, undecided)


def _commands(kind: str, report: Report, messages: list[tuple[str, str]]) -> Iterator[str]:
    for title, message in messages if len(messages) <= ANNOTATIONS else messages[: ANNOTATIONS - 1]:
        yield f"::{kind} title={_property(f'gate {report.policy}: {title}')}::{_data(message)}"
    if len(messages) > ANNOTATIONS:
        more = f"and {len(messages) - ANNOTATIONS + 1} more {'failed' if kind == 'error' else 'undecided'} checks"
        yield f"::{kind} title={_property(f'gate {report.policy}')}::{more}"


def _message(check: Check) -> str:
    return " ".join((check.text, *check.details))


def _case(report: Report, check: Check, names: Sequence[str]) -> ElementTree.Element:
    name = " ".join(part for part in (check.rule, check.name) if part)
    case = ElementTree.Element("testcase", classname=_class(names), name=plain(name), time="0")
    body = "\n".join(map(plain, (check.text, *check.more)))
    if check.status == "fail":
        ElementTree.SubElement(case, "failure", message=plain(check.text), type=check.rule).text = body
    elif check.status == "undecided":
        tag = UNDECIDED_TAG[report.inconclusive]
        ElementTree.SubElement(case, tag, message=f"undecided: {plain(check.text)}", type="undecided").text = body
    elif check.status in ("skip", "excused"):
        why = "" if check.status == "skip" else "another rule of any_of decides: "
        ElementTree.SubElement(case, "skipped", message=plain(f"{why}{check.text}"))
    else:
        ElementTree.SubElement(case, "system-out").text = body
    return case


def _class(names: Iterable[str]) -> str:
    return ".".join(plain(name) for name in names if name)


def _data(text: str) -> str:
    """escapeData of https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts."""
    return plain(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """escapeProperty of the same source."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
