"""`evalengine gate BASELINE RUN --policy ...`: may this change be merged?

Exit codes: 0 the policy holds, 1 it does not, 2 the gate could not judge (runs that are not comparable, a bad policy, a
damaged baseline, bad usage), 3 inconclusive: nothing failed, but some check could not see the loss that the policy
names (the policy's `inconclusive` makes that 0 or 1). All requested reports are written, whatever the verdict. Their
paths are checked first: one that cannot be written is bad usage, and nothing runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import warn
from evalengine.records.evidence import file_problems, repeated, sealed_page
from evalengine.records.folder import write_text_file
from evalengine.records.manifest_data import Manifest
from evalengine.report.gate.gate import NO_BASELINE, could_not_judge, gate, made_run, needs, problems_of, unready
from evalengine.report.gate.page import gate_page
from evalengine.report.gate.policies import available, load_policy, policy_files
from evalengine.report.gate.report import (
    Report,
    junit,
    markdown,
    plain,
    report_lines,
    to_json,
    workflow_commands,
)
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run
from evalengine.report.read.names import LATEST, inputs, stands_for
from evalengine.util.command import Namespace
from evalengine.util.tables import wrapped

JSON_OUT = ("json", "-")  # the option and value for standard output
FILES = ("bootstrap", "junit", "summary", "json", "html")  # options that name a file to write


def main(arguments: Namespace) -> int:
    """Runs the gate, writes its reports and returns the exit code."""
    if problems := [*_path_problems(arguments)]:
        raise ConfigError(problems)
    report = _report(arguments)
    problems = []
    try:
        _print(report, arguments)
    except OSError as error:
        problems.append(f"gate: standard output cannot be written ({error.strerror or error})")
    texts = {"junit": junit, "summary": markdown, "json": to_json, "html": _page}
    for option, path in _files(arguments).items():
        if text := texts.get(option):
            try:  # each file, whatever becomes of the others
                write_text_file(path, text(report), append=option == "summary")
            except EvalEngineError as error:
                problems.append(f"gate: --{option}: {error}")
    if problems:  # bad usage: exit code 1 is that of a failed gate
        raise ConfigError(problems)
    return report.exit_code


def _path_problems(arguments: Namespace) -> Iterator[str]:
    """Return the problems of the files that the options name."""
    files = _files(arguments)
    sources = [*inputs(filter(None, (arguments.baseline, arguments.run, arguments.noise)))]
    with suppress(ConfigError):  # a bad policy is reported by the gate
        sources += policy_files(arguments.policy)
    for option, path in files.items():
        # Where there is no baseline yet, a first run may be written in its place.
        read = [source for source in sources if option != "bootstrap" or source != Path(arguments.baseline)]
        words, append = f"gate: --{option} {path}", option == "summary"
        if str(path) == "-":
            yield f"{words}: only --json writes to standard output; name a file"
        yield from file_problems(words, path, (), read, new_folder=True, append=append)
    yield from repeated("gate", files.values())


def _files(arguments: Namespace) -> dict[str, Path]:
    """The files to write, by option."""
    named = {option: getattr(arguments, option) for option in FILES}
    return {option: Path(name) for option, name in named.items() if name is not None and (option, name) != JSON_OUT}


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
            if problem is not None:  # a first run, which nothing judges, is left as a baseline to commit
                write_baseline(load_run(folder), arguments.bootstrap, force=True)
                text = (
                    f"{arguments.baseline}: there is no such baseline yet; this run is written as one to "
                    f"{arguments.bootstrap}: if it is good, commit it as {arguments.baseline}"
                )
                return replace(problem, problems=(text,), run=str(folder))
            report = gate(arguments.baseline, folder, *policy_and_base, arguments.noise)
            return report if arguments.keep is not None else _without_run(report)
    except EvalEngineError as error:
        policy = load_policy(arguments.policy)
        trouble = "bad settings" if isinstance(error, ConfigError) else "the run failed"
        return could_not_judge(policy, arguments.baseline, "none", trouble, problems_of(error))


def _without_run(report: Report, name: str = f"FOLDER:{LATEST}") -> Report:
    """The report of a removed run: its command needs a run that stays, under this name."""
    reports = tuple(_without_run(one, "RUN") for one in report.reports)
    compare = report.compare and f"rerun with --keep FOLDER, then {report.compare}".replace(
        shlex.quote(report.run), name
    )
    return replace(report, reports=reports, compare=compare)


def _steps(arguments: Namespace) -> dict[str, str]:
    """The settings of a run that ends once this gate is decided; none without --step."""
    if arguments.step is None:
        return {}
    base = {} if arguments.base is None else {"sequential.base": arguments.base}
    policy = arguments.policy if arguments.policy in available() else os.path.abspath(arguments.policy)
    named = {"sequential.baseline": os.path.abspath(stands_for(arguments.baseline)), "sequential.policy": policy}
    return {"sequential.step": str(arguments.step), **named, **base}


def _print(report: Report, arguments: Namespace) -> None:
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
    if arguments.json == "-":
        print(to_json(report), end="")


def _page(report: Report) -> str:
    return sealed_page(gate_page(report).render(), Manifest({})).decode()
