"""The arguments of `plan`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from evalengine.cli.commands.words import Command
from evalengine.util.command import Namespace


def _words(
    words: Annotated[list[str], Argument(metavar="task=NAME margin=POINTS [flips=2%] [alpha=0.05] [power=0.8]",
                     show_default=False, help="one task, a group, or several with commas; the loss that a gate is to "
                     "exclude, in points; the share of answers that change without a reason (repeated fast runs of one "
                     "model show yours)")],
) -> Namespace:  # fmt: skip
    """Says how many documents a gate with a margin needs, whether the task has them, and how long they take here."""
    return Namespace(words=words)


EPILOG = """\
A gate with `margin: POINTS` passes a run without a loss with probability `power` if it has that many documents. Time is
that of the newest finished run of the task in results/, for as many documents.

Exit codes: 0 said, 2 bad usage."""
main = Command("plan", _words, "evalengine.cli.plan:main", EPILOG)
