"""`evalengine baseline RUN -o FILE`: the part of a run that later runs are held against, small enough for git."""

from __future__ import annotations

import sys
from pathlib import Path

from evalengine.command import Namespace
from evalengine.errors import ConfigError, readable
from evalengine.records.folder import write_text_file
from evalengine.report.read.baseline import to_text
from evalengine.report.read.load import load_run
from evalengine.report.read.run import UNBOUND, Run


def main(arguments: Namespace) -> int:
    """Runs `baseline` with its arguments; returns the exit code."""
    file, run = Path(arguments.output), load_run(arguments.run)
    if run.unbound:
        print(f"evalengine: {run.source}: {UNBOUND}", file=sys.stderr)
    size = write_baseline(run, file, arguments.force)
    print(f"{file}: {len(run.items)} items, {size / 1000:.1f} kB, digest {run.digest or 'none (lm-eval)'}")
    return 0


def write_baseline(run: Run, file: Path, force: bool = False) -> int:
    """Writes `file`, whole or not at all, and returns its size in bytes.

    Raises `ConfigError` if it exists (without `force`) or `run` is a baseline, `EvalEngineError` if the disk refuses.
    """
    if run.kind == "baseline":
        raise ConfigError(f"{run.source}: already a baseline; copy the file, or name the run")
    with readable(f"-o {file}"):
        if file.is_dir():
            raise ConfigError(f"-o {file}: a folder; name a file in it, such as {file / run.name}.json")
        if file.exists() and not force:
            raise ConfigError(f"-o {file}: it exists; name another file, or replace it with --force")
    return write_text_file(file, to_text(run))
