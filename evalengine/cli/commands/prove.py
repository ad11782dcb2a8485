"""The arguments and options of `prove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from evalengine.cli.commands.words import Command, setting_of
from evalengine.util.command import Namespace

PLACES = ("data_dir=", "model.", "tasks.", "engine.device=")  # settings that say where rows and weights lie


def _words(
    run: Annotated[str, Argument(metavar="RUN", help="a run's folder, or latest")],
    item: Annotated[str, Option(metavar="ITEM", help="DOC, or TASK/DOC, TASK/DOC/REQUEST, TASK/DOC/REQUEST/REPEAT")],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="the receipt")],
    places: Annotated[list[str] | None, Option("--with", metavar="SETTING=VALUE ...", parser=setting_of(*PLACES),
                      help="where rows and weights lie here: data_dir, model.path, tasks.*")] = None,
) -> Namespace:  # fmt: skip
    """Writes one item of a run as a receipt: prompt and output ids, logprobs, the path from them to the run's digest,
    and what computed them. `check` computes the item again from it, on any machine for a run in exact."""
    return Namespace(run=run, item=item, output=output, places=places or ())


EPILOG = """\
  prove latest --item 3 -o receipt.json
  prove results/RUN --item gsm8k/7 -o receipt.json --with data_dir=/data

Exit codes: 0 written, 1 the disk refused, 2 no such item, a run that cannot be proved, or bad usage."""
main = Command("prove", _words, "evalengine.receipts.prove_cli:main", EPILOG)
