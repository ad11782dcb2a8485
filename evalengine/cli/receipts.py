"""The arguments and options of `prove` and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from evalengine.cli.command import Command, setting_of
from evalengine.util.command import Namespace

PLACES = ("data_dir=", "model.", "tasks.", "engine.device=")  # settings that say where rows and weights lie


def _prove(
    run: Annotated[str, Argument(metavar="RUN", help="a run's folder, or latest")],
    item: Annotated[str, Option(metavar="ITEM", help="DOC, or TASK/DOC, TASK/DOC/REQUEST, TASK/DOC/REQUEST/REPEAT")],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="the receipt")],
    places: Annotated[list[str] | None, Option("--with", metavar="SETTING=VALUE ...", parser=setting_of(*PLACES),
                      help="where rows and weights lie here: data_dir, model.path, tasks.*")] = None,
) -> Namespace:  # fmt: skip
    """Writes one item of a run as a receipt: prompt and output ids, logprobs, the path from them to the run's digest,
    and what computed them. `check` computes the item again from it, on any machine for a run in exact."""
    return Namespace(run=run, item=item, output=output, places=places or ())


PROVE = """\
  prove latest --item 3 -o receipt.json
  prove results/RUN --item gsm8k/7 -o receipt.json --with data_dir=/data

Exit codes: 0 written, 1 the disk refused, 2 no such item, a run that cannot be proved, or bad usage."""
prove = Command("prove", _prove, "evalengine.receipts.cli:prove", PROVE)


def _check(
    source: Annotated[str, Argument(metavar="RECEIPT|RUN", help="a receipt; or a run's folder, or latest")],
    model: Annotated[str | None, Option(metavar="PATH", help="of a receipt: a folder, Hub id or .gguf file")] = None,
    tokenizer: Annotated[str | None, Option(metavar="PATH", help="where it is not beside the weights")] = None,
    adapter: Annotated[str | None, Option(metavar="PATH", help="of a receipt: the LoRA adapter of its run")] = None,
    digest: Annotated[str | None, Option(metavar="HEX", help="the digest that the receipt's run must have")] = None,
    device: Annotated[str, Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N")] = "auto",
    sample: Annotated[int, Option(metavar="N", min=1, help="of a run: how many items")] = 20,
    seed: Annotated[int, Option(metavar="N", help="of a run: which items")] = 0,
    places: Annotated[list[str] | None, Option("--with", metavar="SETTING=VALUE ...", parser=setting_of(*PLACES),
                      help="of a run: where rows and weights lie here: data_dir, model.path, tasks.*")] = None,
) -> Namespace:  # fmt: skip
    """Computes again what a receipt says (`prove` writes one), or a seeded sample of a run's items, and says whether
    every bit agrees: tokens, logprobs, text. What ran in exact can be checked on any machine."""
    arguments = Namespace(**locals())
    arguments.places = places or ()
    return arguments


CHECK = """\
  check receipt.json --model ./checkpoint --digest 28bdce46...   the digest that the run published
  check latest --sample 20

Exit codes: 0 every bit agrees, 1 something differs, 2 it cannot be checked with this model or machine, or bad usage."""
check = Command("check", _check, "evalengine.receipts.cli:check", CHECK)
