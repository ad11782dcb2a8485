"""`python -m evalengine verify`: certifies the installation at hand. Torch is imported once the arguments are good."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from evalengine.plain_text import printable, say
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    from rich.table import Table

    from evalengine.config.schema import Config
    from evalengine.engine.load.loader import Checkpoint
    from evalengine.engine.settings import Settings


def main(arguments: Namespace) -> int:
    """Runs `verify` with its words; returns the exit code."""
    return _kernels(arguments) if arguments.what == "kernels" else _engine(arguments)


def _engine(arguments: Namespace) -> int:
    """Certifies requests under many schedules and, unless only `engine` is named, the kernels."""
    started = time.perf_counter()
    from evalengine.certify.certificate import axes_table, certificate, default_path, summary, write_certificate
    from evalengine.certify.kernels import kernels_verdict
    from evalengine.certify.proof import Prover
    from evalengine.certify.subject import Subject, open_subject, read_settings

    config = read_settings(arguments.settings)
    checkpoint, tasks = open_subject(config, arguments.layers)
    settings = _resolved(config, checkpoint)
    effort = "quick" if arguments.quick else "cpu" if settings.device.type == "cpu" else "gpu"
    subject = Subject(arguments.settings, effort, arguments.layers)
    kernels = None
    if arguments.what is None:
        kernels = kernels_verdict(checkpoint.spec, settings, not arguments.no_cache)
    proof = Prover(subject, checkpoint, tasks, arguments.logprobs).prove(arguments.axes)
    content = certificate(subject, proof, checkpoint, kernels, time.perf_counter() - started)
    files = write_certificate(arguments.out or default_path(content), content)
    *lines, verdict = summary(content)
    _print(axes_table(content), [*lines, f"certificate: {', '.join(map(str, files))}", verdict])
    return 0 if content["verdict"] == "IDENTICAL" else 1


def _kernels(arguments: Namespace) -> int:
    from evalengine.certify.kernels import dropped_schedules, failures, kernels_summary, kernels_verdict
    from evalengine.certify.model import open_checkpoint
    from evalengine.certify.subject import read_settings

    config = read_settings(arguments.settings)
    checkpoint = open_checkpoint(config.model, arguments.layers)
    verdict = kernels_verdict(checkpoint.spec, _resolved(config, checkpoint), not arguments.no_cache)
    for line in kernels_summary(verdict):
        say(line)
    return 1 if failures(verdict) or list(dropped_schedules(verdict)) else 0


def _resolved(config: Config, checkpoint: Checkpoint) -> Settings:
    """The settings with every `auto` resolved for this machine."""
    from evalengine.engine.settings import resolve_settings

    return resolve_settings(config.engine, True, config.numerics, checkpoint.spec)


def _print(table: Table, lines: Iterable[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    from evalengine.util.tables import print_table

    console = Console(file=sys.stdout)
    print_table(table, console)
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)
