"""`evalengine baseline RUN -o FILE`: what of a run a later one is held against, small enough for git."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from evalengine.command import Parser
from evalengine.errors import ConfigError, readable
from evalengine.records.folder import write_text_file
from evalengine.report.read.baseline import to_text
from evalengine.report.read.load import load_run
from evalengine.report.read.run import UNBOUND, Run

HELP = """\
usage: evalengine baseline RUN -o FILE.json [--force]

Writes the run's digests, scores and manifest as one small file (0.2 MB for gsm8k) that lives in git, for
`evalengine compare FILE RUN` and `evalengine gate FILE RUN`.

  RUN            a finished run's folder, or an lm-eval output folder (scores only: it has no digests)
  -o, --output   the file to write
  --force        replaces that file if it exists

Exit codes: 0 written, 1 the disk refused, 2 bad usage, or RUN is unfinished, damaged or edited."""


def main(argv: Sequence[str]) -> int:
    """Runs `baseline` with the words after it; returns the exit code."""
    parser = Parser("baseline", text=HELP)
    parser.add_argument("run", nargs="?")
    parser.add_argument("-o", "--output")
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args(list(argv))
    if not arguments.run or not arguments.output:
        parser.error("give a run and -o FILE.json")
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
