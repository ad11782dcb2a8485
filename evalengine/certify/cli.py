"""`python -m evalengine verify`: certifies the installation at hand. Torch is imported once the arguments are good."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from evalengine.errors import ConfigError, EvalEngineError

if TYPE_CHECKING:
    from rich.table import Table

AXES = (
    *("batch", "order", "neighbours", "chunks", "prefix", "preemption", "pages", "decode", "asked", "ids", "nan"),
    *("threads", "graphs", "mixed", "restart"),
)
WIDTH = 120  # columns where there is no terminal: a cell that is cut cannot be searched
ABOUT = "Certifies the installation at hand."
EXIT_CODES = "Exit codes: 0 identical, 1 differing, incomplete or failed, 2 bad usage."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"verify: {message} (see verify --help)")


def main(argv: Sequence[str]) -> int:
    """Runs `verify` with the words after it; returns the exit code."""
    try:
        arguments = _parse(argv)
        return _engine(arguments) if arguments.what == "engine" else _kernels(arguments)
    except SystemExit as exit:  # argparse's --help
        return int(exit.code or 0)
    except EvalEngineError as error:
        print(f"evalengine: {error}", file=sys.stderr)
        return error.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m evalengine verify", description=ABOUT, epilog=EXIT_CODES, allow_abbrev=False)
    commands = parser.add_subparsers(dest="what", required=True, metavar="engine|kernels", parser_class=_Parser)
    engine = commands.add_parser("engine", help="the same requests under many schedules, compared by bytes",
                                 epilog=EXIT_CODES, allow_abbrev=False)  # fmt: skip
    kernels = commands.add_parser("kernels", help="every kernel schedule that may be chosen, against the reference",
                                  epilog=EXIT_CODES, allow_abbrev=False)  # fmt: skip
    for command in (engine, kernels):
        command.add_argument(
            "--model",
            default="asset:tinymath",
            help="asset:tinymath (default), a folder, a Hub id, shape:qwen3-0.6b or shape:qwen3-8b (dummy weights)",
        )
        command.add_argument("--layers", type=int, metavar="N", help="cut a shape's depth")
        command.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    engine.add_argument("--numerics", default="auto", choices=("auto", "exact", "native"))
    engine.add_argument("--axes", nargs="+", default=AXES, choices=AXES, metavar="AXIS",
                        help=f"what to vary (default: all of {' '.join(AXES)})")  # fmt: skip
    engine.add_argument("--logprobs", type=_count, metavar="N",
                        help="compare at least N, by random schedules at the end (the axis mixed)")  # fmt: skip
    engine.add_argument("--quick", action="store_true", help="few and short requests: a minute less")
    engine.add_argument("--out", type=Path, metavar="FILE.json", help="write the certificate there")
    kernels.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    kernels.add_argument("--no-cache", action="store_true", help="check again what a cached verdict would answer")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of logprobs")
    return int(text)


def _engine(arguments: argparse.Namespace) -> int:
    import torch

    from evalengine.certify.again import Subject
    from evalengine.certify.certificate import axes_table, certificate, summary, write_certificate
    from evalengine.certify.kernels import kernels_verdict
    from evalengine.certify.proof import Prover
    from evalengine.config import resolve_numerics
    from evalengine.engine.loader import weights_fingerprint

    started = time.perf_counter()
    on_cpu = arguments.device == "cpu" or not torch.cuda.is_available()
    effort = "quick" if arguments.quick else "cpu" if on_cpu else "gpu"
    subject = Subject(arguments.model, arguments.layers, arguments.device, arguments.numerics, effort)
    checkpoint = subject.checkpoint()
    kernels = None
    if resolve_numerics(True, arguments.numerics, "cpu" if on_cpu else "cuda") == "native":
        device = "cuda" if arguments.device == "auto" else arguments.device
        kernels = kernels_verdict(checkpoint.spec, str(checkpoint.spec.dtype).removeprefix("torch."), device)
    proof = Prover(subject, checkpoint, arguments.logprobs).prove(arguments.axes)
    content = certificate(subject, proof, weights_fingerprint(checkpoint), kernels, time.perf_counter() - started)
    if arguments.out:
        write_certificate(arguments.out, content)
    _print(axes_table(proof), [*([f"certificate: {arguments.out}"] if arguments.out else []), *summary(content)])
    return 0 if content["verdict"] == "IDENTICAL" else 1


def _kernels(arguments: argparse.Namespace) -> int:
    import torch

    from evalengine.certify.kernels import kernels_summary, kernels_verdict
    from evalengine.certify.model import open_checkpoint

    device = arguments.device
    if device == "auto":
        device = "cuda"
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise ConfigError(f"verify kernels: --device={arguments.device}: kernels with schedules run on CUDA only")
    spec = open_checkpoint(arguments.model, arguments.layers).spec
    dtype = str(spec.dtype).removeprefix("torch.") if arguments.dtype == "auto" else arguments.dtype
    verdict = kernels_verdict(spec, dtype, device, use_cache=not arguments.no_cache)
    for line in kernels_summary(verdict):
        print(line)
    return 1 if verdict["dropped"] or verdict["failed"] else 0


def _print(table: Table, lines: Iterable[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
