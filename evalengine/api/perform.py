"""One run with everything that it leaves: what `python -m evalengine` and `evalengine.evaluate` both do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalengine.config import Config

if TYPE_CHECKING:
    from evalengine.engine.llm import LLM


def perform(config: Config, command: Sequence[str] | None = None, llm: LLM | None = None) -> Path:
    """Runs the tasks, leaves the run's page and the list of all runs beside it; returns the run's folder.

    command: the words that asked for it. llm: an engine that is loaded already (`harness.runner.run`).

    Raises `ConfigError` and `EvalEngineError` as `harness.runner.run` does.
    """
    quiet_threads()
    from evalengine.harness.runner import run
    from evalengine.report.html.leave import leave_list, leave_report

    folder = run(config, leave_report, command, llm).folder
    leave_list(folder)
    if config.log_to is not None:
        from evalengine.report.export.tracking import leave_log

        leave_log(folder, config.log_to)
    return folder


def quiet_threads() -> None:
    """OpenMP threads that spin while they wait starve each other on a busy machine. 20 rows of the default run on two
    cores taken by other programs: 73 s as libgomp spins by itself, 6.6 s with this; idle, 200 rows: 12 and 16 s."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # read when torch is imported
