"""Whole runs, each its own process: what `benchmarks cache` and `benchmarks harness` time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalengine.errors import EvalEngineError


@dataclass(frozen=True)
class Process:
    """A process that has ended well."""

    out: str  # its standard output
    started: float  # UNIX seconds
    seconds: float
    cpu_seconds: float  # its own and its children's
    load_before: float  # on the machine


def timed(bench: str, arguments: Sequence[str]) -> Process:
    """Runs Python with these arguments. bench: the bench's name, for the EvalEngineError if the process fails."""
    load, cpu_before, started = os.getloadavg()[0], _cpu_seconds(), time.time()
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    seconds = time.time() - started
    if process.returncode:
        command, why = " ".join(["python", *arguments[:3]]), process.stderr.strip()[-400:]
        raise EvalEngineError(f"{bench}: `{command} ...` failed: {why}")
    return Process(process.stdout, started, seconds, _cpu_seconds() - cpu_before, load)


def planned(settings: Sequence[str]) -> tuple[Any, Any, Any]:
    """(the configuration, the plan, an engine without weights) of the run that the settings describe."""
    from evalengine.config.compose import compose_jobs
    from evalengine.harness.identity import deferred_llm
    from evalengine.harness.plan import build_plan, prepare

    (job,) = compose_jobs(settings)
    config = job.config
    checkpoint, tasks = prepare(config)
    llm = deferred_llm(config, checkpoint)
    return config, build_plan(config, tasks, llm), llm


def without_places(settings: Sequence[str]) -> list[str]:
    """The settings as a published command shows them: this machine's files and folders are named by their last part."""
    split = (setting.partition("=") for setting in settings)
    return [f"{name}{sign}{Path(value).name if Path(value).exists() else value}" for name, sign, value in split]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
