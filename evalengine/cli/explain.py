"""The arguments and options of `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from evalengine.cli.command import BadUsage, Command, setting_of
from evalengine.util.command import Namespace

NUMERIC = ("batch_invariant=", "numerics=", "engine.", "model.")  # settings that change how numbers are computed
PLACES = ("data_dir=", "model.", "tasks.", "engine.device=", "engine.num_kv_blocks=", "engine.num_threads=")


def _words(
    sources: Annotated[list[str], Argument(metavar="RUN", help="a run's folder, or a file of --write")],
    item: Annotated[str | None, Option(metavar="ITEM", help="DOC, or TASK/DOC, TASK/DOC/REQUEST, "
                    "TASK/DOC/REQUEST/REPEAT (default, for two runs: the first that differs)")] = None,
    against: Annotated[list[str] | None, Option(metavar="SETTING=VALUE ...", parser=setting_of(*NUMERIC),
                       help="compare RUN with itself under other settings: batch_invariant, numerics, engine.*, "
                       "model.*")] = None,
    write: Annotated[Path | None, Option(metavar="FILE", help="write what RUN gives here, for another machine")] = None,
    values: Annotated[list[int] | None, Option(metavar="TOKEN ...", help="with --write: tokens whose outputs go in, "
                      "besides their digests (default: the prompt's last)")] = None,
    places: Annotated[list[str] | None, Option("--with", metavar="SETTING=VALUE ...", parser=setting_of(*PLACES),
                      help="for all runs: where rows and weights lie here (data_dir, model.path, tasks.*), "
                      "engine.device, engine.num_kv_blocks, engine.num_threads")] = None,
    alone: Annotated[bool, Option("--alone", help="run the item by itself, not with the requests that shared its "
                                  "batches")] = False,
    json: Annotated[str | None, Option(metavar="FILE", help="write what was found there; - for standard "
                                       "output")] = None,
) -> Namespace:  # fmt: skip
    """Runs one item again as two runs did, compares the output of every op by bytes, and names the first that differs.

    A RUN is a run's folder, or a FILE that another machine wrote with --write.
    """
    arguments = Namespace(**locals())
    if len(sources) != (1 if write or against else 2):
        raise BadUsage("give two RUNs; or one with --against SETTING=VALUE, or with --write FILE")
    if write and (against or json):
        raise BadUsage("--write only writes; give --against and --json to the comparison")
    if values and not write:
        raise BadUsage("--values is for --write: on one machine every output is at hand")
    return arguments


EPILOG = """\
  explain A B --item 3                       two runs on this machine
  explain A --item 3 --against batch_invariant=false
  explain A --item 3 --write a.json          on each machine; then, on either: explain a.json b.json

Exit codes: 0 no output differs, 1 one does, 2 not comparable or bad usage."""
main = Command("explain", _words, "evalengine.explain.cli:main", EPILOG)
