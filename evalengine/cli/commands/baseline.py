"""The arguments and options of `baseline`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from evalengine.cli.commands.words import BadUsage, Command
from evalengine.util.command import Namespace


def _words(
    run: Annotated[str | None, Argument(metavar="RUN", help="a finished run's folder, or an lm-eval output folder "
                                        "(scores only: it has no digests)")] = None,
    output: Annotated[str | None, Option("-o", "--output", metavar="FILE.json", help="the file to write")] = None,
    force: Annotated[bool, Option("--force", help="replace that file if it exists")] = False,
) -> Namespace:  # fmt: skip
    """Writes the run's digests, scores and manifest as one small file (0.2 MB for gsm8k) that lives in git, for
    `compare FILE RUN` and `gate FILE RUN`."""
    if not run or not output:
        raise BadUsage("give a run and -o FILE.json")
    return Namespace(run=run, output=output, force=force)


EPILOG = "Exit codes: 0 written, 1 the disk refused, 2 bad usage, or RUN is unfinished, damaged or edited."
main = Command("baseline", _words, "evalengine.report.cli.baseline:main", EPILOG)
