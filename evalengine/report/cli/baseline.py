"""`evalengine baseline RUN -o FILE`: the part of a run that later runs are held against, small enough for git."""

from __future__ import annotations

from pathlib import Path

from evalengine.plain_text import say, warn
from evalengine.report.html.on_complete import refresh_index
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run
from evalengine.report.read.names import INDEX, root_of
from evalengine.report.read.run import UNBOUND
from evalengine.util.command import Namespace


def main(arguments: Namespace) -> int:
    """Runs `baseline` with its arguments; returns the exit code."""
    file, run = Path(arguments.output), load_run(arguments.run)
    if run.unbound:
        warn(f"{run.source}: {UNBOUND}")
    size = write_baseline(run, file, arguments.force)
    if (root_of(run.source) / INDEX).exists():
        refresh_index(root_of(run.source))  # it says of every run whether it equals the latest baseline
    say(f"{file}: {len(run.items)} items, {size / 1000:.1f} kB, digest {run.digest or f'none ({run.program})'}")
    return 0
