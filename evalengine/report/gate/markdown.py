"""A gate's report as Markdown that reads well as text, too: for a job's summary, a comment, a terminal's pager."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from evalengine.report.gate.checks import Check, Status
from evalengine.report.gate.plain_text import plain
from evalengine.report.gate.report import SIGNS, Report, headline

SUMMARY_LENGTH = 250_000  # characters, 4 bytes each at most: GitHub refuses summaries above 1 MiB
MARKS: dict[Status, str] = {"fail": "❌ fail", "undecided": "🟡 undecided", "excused": "➖ excused", "skip": "➖ skip",
                            "pass": "✅ pass"}  # fmt: skip
ORDER = tuple(MARKS)  # checks that need a reader come first


def markdown(report: Report) -> str:
    """Headline, warnings, problems, a table of checks (what failed or was undecided first), then what each saw."""
    sign = SIGNS[report.verdict]
    lines = [f"### {sign} {escaped(headline(report))}", ""]
    lines += [f"**⚠️ {escaped(warning)}**\n" for warning in report.warnings]
    lines += [escaped(report.description) + "\n"] if report.description else []
    lines += [f"- baseline: {escaped(report.baseline)}", f"- run: {escaped(report.run)}"]
    lines += [f"- not judged: {escaped(note)}" for note in report.notes]
    if report.problems:
        lines += ["", f"**{escaped(report.trouble.capitalize())}**", ""]
        lines += [f"- {escaped(problem)}" for problem in report.problems]
    checks = sorted(report.checks, key=lambda check: ORDER.index(check.status))
    if checks:
        lines += ["", *_table(checks)]
    return "\n".join(lines).rstrip() + "\n\n"


def escaped(text: str) -> str:
    """`plain` text that renders as itself, with an entity only where Markdown, GitHub or HTML would see a meaning: the
    underscores in a metric's name, arrows and quotes stay as they are."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", plain(text))  # before the lines below make entities
    text = re.sub(r"[\\`*\[\]<|~@$]|://|!(?=\[)", _entities, text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", _entities, text)  # inside a word it is no emphasis
    text = re.sub(r"(?<!&)#(?=\w)|^(#|>|-(?= )|\+(?= )|\d+(?=[.)] ))", _entities, text)  # an issue, a heading, a list
    return re.sub(r"(?i)\bwww\.", lambda match: f"{match[0][:3]}&#46;", text)


def _table(checks: Sequence[Check]) -> Iterator[str]:
    """The table, then the details of checks that have some, below GitHub's limit."""
    yield "| | rule | task | metric | result |"
    yield "|---|---|---|---|---|"
    length = shown = 0
    below: list[str] = []
    for check in checks:
        cells = (check.rule, check.task, check.name, check.message)
        row = f"| {MARKS[check.status]} | {' | '.join(map(escaped, cells))} |"
        more = [f"- {escaped(check.label)}: {escaped(text)}" for text in _seen(check)]
        length += len(row) + sum(map(len, more))
        if length > SUMMARY_LENGTH:
            break
        yield row
        below += more
        shown += 1
    if shown < len(checks):
        yield f"\n{len(checks) - shown} more checks are not shown."
    yield from ("", *below)


def _seen(check: Check) -> Iterator[str]:
    yield from check.details
    if check.detects:
        yield check.detects


def _entities(match: re.Match[str]) -> str:
    return "".join(f"&#{ord(char)};" for char in match[0])
