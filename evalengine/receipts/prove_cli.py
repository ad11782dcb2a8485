"""`python -m evalengine prove RUN --item K -o FILE`: one item of a run as a receipt that anyone can check."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evalengine.command import Parser
from evalengine.errors import ConfigError

ABOUT = """\
Writes one item of a run as a receipt: prompt and output ids, logprobs, the path from them to the run's digest, and
what computed them. `check` computes the item again from it, on any machine for a run in exact."""
EPILOG = """\
  prove latest --item 3 -o receipt.json
  prove results/RUN --item gsm8k/7 -o receipt.json --with data_dir=/data

Exit codes: 0 written, 1 the disk refused, 2 no such item, a run that cannot be proved, or bad usage."""


def main(argv: Sequence[str]) -> int:
    """Runs `prove` with the words after it; returns the exit code."""
    arguments = _parse(argv)
    from evalengine.receipts.prove import prove
    from evalengine.receipts.receipt import write_receipt
    from evalengine.report.read.load import load_run

    receipt = prove(load_run(arguments.run), arguments.item, arguments.places)
    size = write_receipt(arguments.output, receipt)
    record = receipt.record
    print(
        f"{arguments.output}: {'/'.join(map(str, receipt.key))}, {len(record.prompt_ids)} tokens in and "
        f"{len(record.output_ids)} out, {size / 1000:.1f} kB; leaf {receipt.index} of {receipt.count}"
    )
    print(f"digest: {receipt.digest}")
    return 0


def place(text: str) -> str:
    """`data_dir=...`, `model.*=...` or `tasks.*=...`: where rows and weights lie."""
    if "=" not in text or not text.startswith(("data_dir=", "model.", "tasks.", "engine.device=")):
        raise argparse.ArgumentTypeError(f"{text!r} must set one of data_dir, model.*, tasks.*, engine.device")
    return text


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("prove", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or latest")
    parser.add_argument("--item", metavar="ITEM", required=True,
                        help="DOC, or TASK/DOC, TASK/DOC/REQUEST, TASK/DOC/REQUEST/REPEAT")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--with", dest="places", nargs="+", default=(), metavar="SETTING=VALUE", type=place,
                        help="where rows and weights lie here: data_dir, model.path, tasks.*")  # fmt: skip
    arguments = parser.parse_intermixed_args(argv)
    if arguments.output.is_dir():
        raise ConfigError(f"prove: -o {arguments.output}: a folder; name a file in it")
    return arguments
