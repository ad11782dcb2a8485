"""`evalengine gate BASELINE RUN --policy ...`: may this change be merged?

Exit codes: 0 the policy holds, 1 it does not, 2 the gate could not judge (runs that are not comparable, a bad policy, a
damaged baseline, bad usage), 3 inconclusive: nothing failed, but some check could not see the loss that the policy
names (the policy's `inconclusive` makes that 0 or 1). The reports that were asked for are written in every case.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import warn
from evalengine.report.gate.gate import NO_BASELINE, could_not_judge, gate, needs, problems_of, unready
from evalengine.report.gate.page import gate_page
from evalengine.report.gate.policy_reader import available, load_policy
from evalengine.report.gate.report import (
    Report,
    junit,
    markdown,
    plain,
    report_lines,
    to_json,
    workflow_commands,
    write,
)
from evalengine.report.gate.sources import made_run
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run
from evalengine.report.read.names import stands_for
from evalengine.util.command import Namespace
from evalengine.util.tables import wrapped


def main(arguments: Namespace) -> int:
    """Runs the gate, writes its reports and returns the exit code."""
    report = _report(arguments)
    try:
        _deliver(report, arguments)
        if arguments.html:
            arguments.html.parent.mkdir(parents=True, exist_ok=True)
            gate_page(report).write(arguments.html)
    except OSError as error:
        raise ConfigError(f"{error.filename}: the gate's report cannot be written ({error.strerror})") from error
    except EvalEngineError as error:  # its exit code is that of a failed gate
        raise ConfigError(f"gate: --html: {error}") from error
    return report.exit_code


def _report(arguments: Namespace) -> Report:
    policy_and_base = (arguments.policy, arguments.base)
    if arguments.run is not None:
        return gate(arguments.baseline, arguments.run, *policy_and_base, arguments.noise)
    problem = unready(arguments.baseline, *policy_and_base)  # before minutes are spent on a run
    first = problem is not None and problem.trouble == NO_BASELINE and arguments.bootstrap is not None
    if problem is not None and not first:
        return problem
    for line in [] if first else needs(arguments.baseline, *policy_and_base):
        warn(plain(line))
    try:
        with made_run(arguments.settings, arguments.keep, {} if first else _steps(arguments)) as folder:
            if problem is not None:
                return _bootstrapped(problem, folder, arguments)
            return gate(arguments.baseline, folder, *policy_and_base, arguments.noise)
    except ConfigError:
        raise
    except EvalEngineError as error:
        policy = load_policy(arguments.policy)
        return could_not_judge(policy, arguments.baseline, "none", "the run failed", problems_of(error))


def _steps(arguments: Namespace) -> dict[str, str]:
    """The settings of a run that ends once this gate is decided; none without --step."""
    if arguments.step is None:
        return {}
    base = {} if arguments.base is None else {"sequential.base": arguments.base}
    policy = arguments.policy if arguments.policy in available() else os.path.abspath(arguments.policy)
    named = {"sequential.baseline": os.path.abspath(stands_for(arguments.baseline)), "sequential.policy": policy}
    return {"sequential.step": str(arguments.step), **named, **base}


def _bootstrapped(report: Report, folder: Path, arguments: Namespace) -> Report:
    """The report of a first run: it is judged by nothing, and is left as a baseline to commit."""
    write_baseline(load_run(folder), arguments.bootstrap, force=True)
    problem = (
        f"{arguments.baseline}: there is no such baseline yet; this run is written as one to {arguments.bootstrap}: if "
        f"it is good, commit it as {arguments.baseline}"
    )
    return replace(report, problems=(problem,), run=str(folder))


def _deliver(report: Report, arguments: Namespace) -> None:
    """Prints the report first, so that a full disk does not lose it, then writes its files."""
    out = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=out, soft_wrap=True, highlight=False)
    first, *lines = report_lines(report, arguments.risk, arguments.verbose)
    for part in wrapped(first.plain, console):
        console.print(Text(part, style=first.style))
    for line in lines:
        console.print(line)
    for problem in report.problems:
        warn(plain(problem))
    if arguments.annotations:
        for command in workflow_commands(report):
            print(command, file=out)
    if arguments.junit:
        write(arguments.junit, junit(report))
    if arguments.summary:
        write(arguments.summary, markdown(report), append=True)
    if arguments.json == "-":
        print(to_json(report), end="")
    elif arguments.json:
        write(Path(arguments.json), to_json(report))
