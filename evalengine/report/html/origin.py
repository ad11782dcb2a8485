"""Where a page's numbers come from: date, id and command of each run, on every page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.read.provenance import provenance
from evalengine.report.read.run import Run


def origin_facts(run: Run) -> Iterator[tuple[str, Child]]:
    """(name, value) of what is known, for `parts.facts`."""
    origin = provenance(run)
    if origin.date:
        yield "Date", origin.date
    if origin.run_id:
        yield "Run", tag("code", origin.run_id)
    yield "Command", tag("code", origin.command) if origin.command else _no_command(run)


def origin_line(run: Run, command: bool = True) -> Markup:
    """`origin_facts` on one line below a run's name. command: False where the page names one for all runs."""
    origin = provenance(run)
    date_and_id = " · ".join(part for part in (origin.date, f"run {origin.run_id}" if origin.run_id else "") if part)
    last = (tag("code", origin.command) if origin.command else _no_command(run)) if command else None
    return tag("span", join(date_and_id, " · " if date_and_id and last else None, last), class_="under")


def common_command(runs: Sequence[Run]) -> str | None:
    """The command that all of the runs come from, as a sweep's do; None if they come from several."""
    commands = {provenance(run).command for run in runs}
    return commands.pop() if len(commands) == 1 else None


def _no_command(run: Run) -> str:
    if run.by_lm_eval:
        return "lm-eval records no command"
    if run.program == "evalengine in lm-eval":
        return "run by lm-eval, which records no command"
    return "started from Python" if run.manifest.started else "command not recorded (an older run)"
