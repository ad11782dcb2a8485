"""`evalengine gate BASELINE RUN --policy ...`: may this change be merged?

Exit codes: 0 the policy holds, 1 it does not, 2 the gate could not judge (runs that are not comparable, a bad policy, a
damaged baseline, bad usage). All of them reach the reports that were asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from evalengine.command import Parser
from evalengine.errors import ConfigError
from evalengine.report.ci import Report, error_lines, headline, junit, markdown, plain, to_json, write
from evalengine.report.gate import gate
from evalengine.report.policies import available

EPILOG = """\
policies: bitwise   every bit as in the baseline: for changes that mean to touch no arithmetic
          tokens    the same tokens, logprobs within epsilon
          accuracy  no metric worse than chance explains (one-sided exact McNemar or permutation test, Holm)
          FILE      your own; conf/gate/accuracy.yaml shows every setting

On GitHub Actions (GITHUB_ACTIONS=true) annotations are on, and the summary goes to $GITHUB_STEP_SUMMARY, unless
--no-annotations or --summary say otherwise. A summary is appended to its file.

exit codes: 0 the policy holds, 1 it does not, 2 not comparable, bad policy, damaged baseline or bad usage"""


def main(argv: Sequence[str]) -> int:
    """Runs the gate, writes its reports and returns the exit code."""
    arguments = _parse(argv)
    report = gate(arguments.baseline, arguments.run, arguments.policy)
    try:
        _deliver(report, arguments)
    except OSError as error:
        raise ConfigError(f"{error.filename}: the gate's report cannot be written ({error.strerror})") from error
    return report.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "gate",
        description="Judges RUN against BASELINE (run folders, or a file of `evalengine baseline`).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("baseline", metavar="BASELINE")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--policy", default="bitwise", metavar="NAME|FILE", help=f"{', '.join(available())}, or a file")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="JUnit XML")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="Markdown, appended")
    parser.add_argument("--json", metavar="FILE", help="JSON; - for standard output, which then holds nothing else")
    parser.add_argument("--annotations", action=argparse.BooleanOptionalAction, help="::error lines for GitHub")
    arguments = parser.parse_args(argv)
    if arguments.annotations is None:
        arguments.annotations = os.environ.get("GITHUB_ACTIONS") == "true"
    if arguments.summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        arguments.summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    return arguments


def _deliver(report: Report, arguments: argparse.Namespace) -> None:
    """The terminal's text first: it must not be lost to a full disk."""
    out = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=out, soft_wrap=True, highlight=False)
    for line in _lines(report):
        console.print(line)
    for problem in report.problems:
        print(f"evalengine: {plain(problem)}", file=sys.stderr)
    if arguments.annotations:
        for command in error_lines(report):
            print(command, file=out)
    console.print(Text(headline(report), style="bold green" if report.verdict == "pass" else "bold red"))
    if arguments.junit:
        write(arguments.junit, junit(report))
    if arguments.summary:
        write(arguments.summary, markdown(report), append=True)
    if arguments.json == "-":
        print(to_json(report), end="")
    elif arguments.json:
        write(Path(arguments.json), to_json(report))


def _lines(report: Report) -> Iterator[Text]:
    """A line per check, its details below. No line begins with text from outside, which GitHub might obey."""
    styles = {"pass": "green", "fail": "bold red"}
    for check in report.checks:
        status = Text(f"{check.status.upper():<8}", style=styles.get(check.status, "yellow"))
        yield status + Text(f"{plain(check.label)}: {plain(check.message)}", style="default")
        for detail in check.details:
            yield Text(f"        - {plain(detail)}")
        if check.detects:
            yield Text(f"        can detect: {plain(check.detects)}", style="dim")
    for note in report.notes:
        yield Text(f"allowed to differ: {plain(note)}")
