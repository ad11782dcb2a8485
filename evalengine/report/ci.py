"""A gate's verdict for machines: JSON, JUnit XML, a GitHub job summary (Markdown) and `::error` annotations.

Names of tasks and metrics and the answers in them come from others, so every sink escapes them for itself. `plain`
comes first everywhere: no control, format or bidirectional character survives, hence no line break, no terminal
sequence, no character that XML forbids, and no line that begins with a workflow command of its own.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from evalengine.report.checks import Check

LONGEST = 400  # characters of one text from outside
ANNOTATIONS = 10  # GitHub shows ten errors a step and drops the rest
SUMMARY_LENGTH = 250_000  # characters, 4 bytes each at most: GitHub refuses summaries above 1 MiB
MARKS = {"pass": "✅ pass", "fail": "❌ fail", "skip": "➖ skip", "excused": "➖ excused"}


@dataclass(frozen=True)
class Report:
    """What a gate found. `problems` are sentences that say why it could not judge (verdict "error")."""

    verdict: Literal["pass", "fail", "error"]
    policy: str
    description: str
    baseline: str
    run: str
    baseline_digest: str | None = None
    run_digest: str | None = None
    checks: tuple[Check, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the policy lets differ, and differs

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "fail": 1, "error": 2}[self.verdict]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]


def headline(report: Report) -> str:
    """`gate accuracy: FAIL (1 of 3 checks)`."""
    judged = [check for check in report.checks if check.status in ("pass", "fail")]
    counts = {
        "pass": f"{len(judged)} of {len(judged)} checks" if judged else "no checks",
        "fail": f"{len(report.failures)} of {len(judged)} checks failed",
        "error": "not comparable",
    }
    return f"gate {plain(report.policy)}: {report.verdict.upper()} ({counts[report.verdict]})"


def to_json(report: Report) -> str:
    """The report as JSON, ASCII only. Keys: the fields of `Report` and of `Check`, and `exit_code`."""
    return json.dumps({**asdict(report), "exit_code": report.exit_code}, indent=2, allow_nan=False) + "\n"


def junit(report: Report) -> str:
    """JUnit XML as GitLab and Jenkins read it: a test case per check; one with `<error>` per problem."""
    cases = [_case(report, check) for check in report.checks]
    for number, problem in enumerate(report.problems, 1):
        case = ElementTree.Element("testcase", classname=_class(report, ""), name=f"comparable {number}", time="0")
        ElementTree.SubElement(case, "error", message=plain(problem), type="not comparable").text = plain(problem, None)
        cases.append(case)
    counts = {
        "tests": str(len(cases)),
        "failures": str(len(report.failures)),
        "errors": str(len(report.problems)),
        "skipped": str(sum(check.status in ("skip", "excused") for check in report.checks)),
        "time": "0",
    }
    root = ElementTree.Element("testsuites", {"name": "evalengine gate", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"evalengine gate {plain(report.policy)}", **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("baseline", "run", "baseline_digest", "run_digest"):
        ElementTree.SubElement(properties, "property", name=name, value=plain(str(getattr(report, name) or "")))
    suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def markdown(report: Report) -> str:
    """A section for GITHUB_STEP_SUMMARY: headline, problems, a table of checks (failures first), what can be seen."""
    lines = [f"### {'✅' if report.verdict == 'pass' else '❌'} {_md(headline(report))}", ""]
    lines += [f"{_md(report.description)}  "] if report.description else []
    lines += [f"Baseline {_md(report.baseline)}, run {_md(report.run)}", ""]
    lines += [f"- {_md(problem)}" for problem in report.problems]
    order = {"fail": 0, "excused": 1, "skip": 2, "pass": 3}
    checks = sorted(report.checks, key=lambda check: order[check.status])
    if checks:
        lines += ["", "| | rule | task | metric | result | can detect |", "|---|---|---|---|---|---|"]
    length = shown = 0
    for check in checks:
        result = "<br>".join(_md(text) for text in (check.message, *check.details))
        cells = (check.rule, check.task, check.name)
        row = f"| {MARKS[check.status]} | {' | '.join(_md(cell) for cell in cells)} | {result} | {_md(check.detects)} |"
        length += len(row)
        if length > SUMMARY_LENGTH:
            break
        lines.append(row)
        shown += 1
    if shown < len(checks):
        lines += ["", f"{len(checks) - shown} more checks are not shown."]
    lines += ["", *(f"- allowed to differ: {_md(note)}" for note in report.notes)]
    return "\n".join(lines).rstrip() + "\n\n"


def error_lines(report: Report) -> Iterator[str]:
    """GitHub's workflow commands, a line each: `::error title=...::message`."""
    errors = [("not comparable", problem) for problem in report.problems]
    errors += [(check.label, " ".join((check.message, *check.details))) for check in report.failures]
    for title, message in errors if len(errors) <= ANNOTATIONS else errors[: ANNOTATIONS - 1]:
        yield f"::error title={_property(f'gate {report.policy}: {title}')}::{_data(message)}"
    if len(errors) > ANNOTATIONS:
        more = f"and {len(errors) - ANNOTATIONS + 1} more failed checks"
        yield f"::error title={_property(f'gate {report.policy}')}::{more}"


def plain(text: str, longest: int | None = LONGEST) -> str:
    """`text` on one line of visible characters: all others as \\u escapes; cut at `longest`; `##[` broken up, for it is
    a workflow command of GitHub's wherever it stands in a line."""
    shown = "".join(char if _visible(char) else _escape(char) for char in text).replace("##[", "# #[")
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."


def write(path: Path, text: str, append: bool = False) -> None:
    """Writes a report's file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(text)


def _case(report: Report, check: Check) -> ElementTree.Element:
    name = " ".join(part for part in (check.rule, check.name) if part)
    case = ElementTree.Element("testcase", classname=_class(report, check.task), name=plain(name), time="0")
    body = "\n".join(plain(text) for text in (check.message, *check.details, check.detects) if text)
    if check.status == "fail":
        ElementTree.SubElement(case, "failure", message=plain(check.message), type=check.rule).text = body
    elif check.status in ("skip", "excused"):
        why = "" if check.status == "skip" else "failed, but another rule of any_of passed: "
        ElementTree.SubElement(case, "skipped", message=plain(f"{why}{check.message}"))
    else:
        ElementTree.SubElement(case, "system-out").text = body
    return case


def _class(report: Report, task: str) -> str:
    return ".".join(("gate", plain(report.policy), *([plain(task)] if task else [])))


def _visible(char: str) -> bool:
    """No control, format, surrogate, private or unassigned character (Unicode's C*), no line or paragraph break."""
    return unicodedata.category(char)[0] != "C" and unicodedata.category(char) not in ("Zl", "Zp")


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _md(text: str) -> str:
    """Every character that Markdown or HTML gives a meaning becomes an entity, which renders as itself."""
    escaped = re.sub(r"[\\`*_{}\[\]<>#|~!@:$&^\"']", lambda found: f"&#{ord(found[0])};", plain(text))
    return re.sub(r"(?i)\bwww\.", lambda found: f"{found[0][:3]}&#46;", escaped)


def _data(text: str) -> str:
    """https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts: escapeData."""
    return plain(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """The same source: escapeProperty."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
