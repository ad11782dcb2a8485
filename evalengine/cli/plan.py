"""The arguments of `plan`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from evalengine.cli.command import Command
from evalengine.util.command import Namespace


def _words(
    words: Annotated[list[str], Argument(metavar="task=NAME [policy=NAME] [runs=RUN,RUN] [flips=2%] [margin=POINTS] "
                     "[margin_percent=PERCENT] [alpha=0.05] [power=0.8]", show_default=False, help="one task, a group, "
                     "or several with commas; the gate's policy, a name or a file (accuracy); runs or baseline files, "
                     "whose documents, clusters and differences are used; the share of answers that change without a "
                     "reason; the policy's limits, if others than its own")],
) -> Namespace:  # fmt: skip
    """Show how many documents each check of a gate needs, and how likely the gate passes with those that there are."""
    return Namespace(words=words)


EPILOG = """\
With so many documents all checks of the policy pass with probability `power`, if nothing is lost. The checks count as
independent: those that share documents pass together more often. Time is by the newest finished run of the task in
results/, or by a checkout's reference records; it says by which.

  plan task=gsm8k,arc_easy margin=1
  plan task=gsm8k,drop policy=own.yaml runs=baseline.json   a policy's checks; passages of drop as the baseline has them
  plan task=wikitext runs=RUN,RUN                           perplexities need two runs, which show their differences
  plan task=gsm8k runs=noise_floor-gsm8k-...                how many answers change by the schedule alone
  plan task=gsm8k runs=latest                               of task.repeats=8: what more samples buy

Exit codes: 0 said, 2 bad usage."""
main = Command("plan", _words, "evalengine.cli.documents_needed:main", EPILOG)
