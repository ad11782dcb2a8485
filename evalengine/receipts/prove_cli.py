"""`python -m evalengine prove RUN --item K -o FILE`: one item of a run as a receipt that anyone can check."""

from __future__ import annotations

from evalengine.errors import ConfigError
from evalengine.plain_text import say
from evalengine.util.command import Namespace


def main(arguments: Namespace) -> int:
    """Runs `prove` with its arguments; returns the exit code."""
    if arguments.output.is_dir():
        raise ConfigError(f"prove: -o {arguments.output}: a folder; name a file in it")
    from evalengine.receipts.prove import prove
    from evalengine.receipts.receipt import write_receipt
    from evalengine.report.read.load import load_run

    receipt = prove(load_run(arguments.run), arguments.item, arguments.places)
    size = write_receipt(arguments.output, receipt)
    record = receipt.record
    say(
        f"{arguments.output}: {'/'.join(map(str, receipt.key))}, {len(record.prompt_ids)} tokens in and "
        f"{len(record.output_ids)} out, {size / 1000:.1f} kB; leaf {receipt.index} of {receipt.count}"
    )
    say(f"digest: {receipt.digest}")
    return 0
