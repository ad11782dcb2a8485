"""`python -m evalengine check`: a receipt's item, or a sample of a run's, is computed again and compared bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evalengine.command import Parser
from evalengine.errors import ConfigError, readable
from evalengine.receipts.prove_cli import place

ABOUT = """\
Computes again what a receipt says (`prove` writes one), or a seeded sample of a run's items, and says whether every
bit agrees: tokens, logprobs, text. What ran in exact can be checked on any machine."""
EPILOG = """\
  check receipt.json --model ./checkpoint --digest 28bdce46...   the digest that the run published
  check latest --sample 20

Exit codes: 0 every bit agrees, 1 something differs, 2 it cannot be checked with this model or machine, or bad usage."""


def main(argv: Sequence[str]) -> int:
    """Runs `check` with the words after it; returns the exit code."""
    arguments = _parse(argv)
    with readable(arguments.source):
        is_file = Path(arguments.source).is_file()
    if is_file:
        if arguments.model is None:
            raise ConfigError("check: --model names the model that is to compute the receipt's item; give its path")
        return _check_receipt(arguments)
    if arguments.model or arguments.digest or arguments.tokenizer:
        raise ConfigError("check: --model, --tokenizer and --digest are for a receipt; of a run, --with model.path=...")
    return _check_run(arguments)


def _check_receipt(arguments: argparse.Namespace) -> int:
    from evalengine.receipts.receipt import read_receipt

    receipt = read_receipt(Path(arguments.source))
    name = "/".join(map(str, receipt.key))
    if not receipt.leads_to_digest():
        where = f"the digest {receipt.digest[:16]}..."
        return _differs(f"{name}: its prompt, output and logprobs do not lead to {where}: the receipt was edited")
    if arguments.digest and arguments.digest != receipt.digest:
        return _differs(f"{name}: of a run with the digest {receipt.digest}, not {arguments.digest}")
    from evalengine.config import ModelConfig
    from evalengine.receipts.compute import parted

    model = ModelConfig(name=arguments.model, path=arguments.model, tokenizer=arguments.tokenizer)
    if found := parted(receipt, model, arguments.device, arguments.source):
        return _differs(f"{name}: {found}")
    record = receipt.record
    print(
        f"{name}: {len(record.prompt_ids)} tokens in, {len(record.output_ids)} out, computed again in "
        f"{receipt.computed_by['numerics']} {receipt.computed_by['dtype']}: every bit agrees"
    )
    print(f"digest: {receipt.digest} (leaf {receipt.index}, by {len(receipt.path)} hashes)")
    print("verdict: AGREES")
    return 0


def _check_run(arguments: argparse.Namespace) -> int:
    from evalengine.receipts.check_run import differing
    from evalengine.report.read.load import load_run

    run = load_run(arguments.source)
    checked, found = differing(run, arguments.sample, arguments.seed, arguments.places)
    for line in found:
        print(line)
    if found:
        return _differs(f"{len(found)} of {checked} items of {run.name}, drawn by seed {arguments.seed}, differ")
    print(f"{checked} of {len(run.items)} items of {run.name}, drawn by seed {arguments.seed}: every bit agrees")
    print(f"digest: {run.digest}")
    print("verdict: AGREES")
    return 0


def _differs(why: str) -> int:
    print(why)
    print("verdict: DIFFERS")
    return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("check", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="RECEIPT|RUN", help="a receipt; or a run's folder, or latest")
    parser.add_argument("--model", metavar="PATH", help="of a receipt: a folder, a Hub id or a .gguf file")
    parser.add_argument("--tokenizer", metavar="PATH", help="where it is not beside the weights")
    parser.add_argument("--digest", metavar="HEX", help="the digest that the receipt's run must have")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    parser.add_argument("--sample", type=_count, default=20, metavar="N", help="of a run: how many items (default 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of a run: which items (default 0)")
    parser.add_argument("--with", dest="places", nargs="+", default=(), metavar="SETTING=VALUE", type=place,
                        help="of a run: where rows and weights lie here: data_dir, model.path, tasks.*")  # fmt: skip
    return parser.parse_intermixed_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number of items")
    return int(text)
