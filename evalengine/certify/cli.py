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
    arguments = parser.parse_args(argv)
    if arguments.what == "engine" and arguments.logprobs is not None and "mixed" not in arguments.axes:
        parser.error(f"--logprobs={arguments.logprobs}: only the axis mixed goes on for longer; add it to --axes")
    return arguments


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of logprobs")
    return int(text)


def _engine(arguments: argparse.Namespace) -> int:
    from evalengine.certify.again import Subject
    from evalengine.certify.certificate import axes_table, certificate, summary, write_certificate
    from evalengine.certify.kernels import kernels_verdict
    from evalengine.certify.model import open_checkpoint
    from evalengine.certify.proof import Prover
    from evalengine.config import EngineConfig
    from evalengine.engine.loader import weights_fingerprint
    from evalengine.engine.settings import resolve_settings

    started = time.perf_counter()
    checkpoint = open_checkpoint(arguments.model, arguments.layers)
    settings = resolve_settings(EngineConfig(device=arguments.device), True, arguments.numerics, checkpoint.spec)
    effort = "quick" if arguments.quick else "cpu" if settings.device.type == "cpu" else "gpu"
    subject = Subject(arguments.model, arguments.layers, arguments.device, arguments.numerics, effort)
    kernels = None
    if settings.numerics == "native":
        kernels = kernels_verdict(checkpoint.spec, settings.dtype, settings.device)
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
    from evalengine.config import EngineConfig
    from evalengine.engine.settings import resolve_settings

    if arguments.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError(f"verify kernels: --device={arguments.device}: kernels with schedules run on CUDA only")
    spec = open_checkpoint(arguments.model, arguments.layers).spec
    config = EngineConfig(device=arguments.device, dtype=arguments.dtype)
    settings = resolve_settings(config, True, "native", spec)
    verdict = kernels_verdict(spec, settings.dtype, settings.device, use_cache=not arguments.no_cache)
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
