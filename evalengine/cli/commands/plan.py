"""The arguments of `plan`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from evalengine.cli.commands.words import Command
from evalengine.util.command import Namespace


def _words(
    words: Annotated[list[str], Argument(metavar="task=NAME margin=POINTS [flips=2%] [runs=RUN,RUN] [alpha=0.05] "
                     "[power=0.8]", show_default=False, help="one task, a group, or several with commas; the loss "
                     "that a gate is to exclude, in points; the share of answers that change without a reason; or runs "
                     "that show it (fast ones of one configuration, an experiment's folder), or have several samples")],
) -> Namespace:  # fmt: skip
    """Says how many documents a gate with a margin needs, whether the task has them, and how long they take here."""
    return Namespace(words=words)


EPILOG = """\
A gate with `margin: POINTS` passes a run without a loss with probability `power` if it has that many documents. Time is
by the newest finished run of the task in results/, or by a checkout's reference records; it says by which.

  plan task=gsm8k margin=1
  plan task=gsm8k margin=1 runs=noise_floor-gsm8k-...       how many answers the schedule of fast runs flips by itself
  plan task=gsm8k margin=1 runs=latest                      of task.repeats=8: what more samples buy

Exit codes: 0 said, 2 bad usage."""
main = Command("plan", _words, "evalengine.cli.plan:main", EPILOG)
