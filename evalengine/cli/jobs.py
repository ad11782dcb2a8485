"""What `python -m evalengine [run]` does with its settings: makes a run, a sweep or an experiment.

Hydra is imported for settings and torch when a run starts, so that configuration errors answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from evalengine.errors import listed
from evalengine.plain_text import say, warn
from evalengine.util.command import Namespace, exit_code
from evalengine.util.early_gpu import wake_gpu
from evalengine.util.phases import phase
from evalengine.util.plugins import load
from evalengine.version import CONTRACT_VERSION, __version__

if TYPE_CHECKING:
    from evalengine.config.compose import Job
    from evalengine.config.schema import Config


def main(arguments: Namespace) -> int:
    """Runs what the settings describe; returns the exit code."""
    if arguments.version:
        say(f"evalengine {__version__} (contract {CONTRACT_VERSION})")
        return 0
    from evalengine.config.compose import experiment_name
    from evalengine.config.schema import to_yaml

    if not arguments.cfg and not arguments.multirun:
        wake_gpu(arguments.settings)
    jobs = _composed(arguments)
    if arguments.cfg:
        print("---\n".join(to_yaml(job.config) for job in jobs), end="")
        return 0
    _announce(jobs[0].config)
    if name := experiment_name(arguments.settings):
        from evalengine.cli.experiment import run_experiment

        return run_experiment(name, jobs, partial(_run, command=arguments.argv))
    return _run_all(jobs, arguments.argv)


def _announce(config: Config) -> None:
    """Says on a terminal what the seconds before the first bar of progress are spent on: up to 15 on two busy cores."""
    if config.progress and sys.stderr is not None and sys.stderr.isatty():
        needed = "libraries and rows" if config.model.api is not None else "libraries, rows and the model"
        warn(f"{listed([*config.tasks], 3)} on {config.model.name}: loading {needed} ...", "")


@phase("settings")
def _composed(arguments: Namespace) -> list[Job]:
    from evalengine.config.compose import compose_jobs

    return compose_jobs(arguments.settings, arguments.multirun)


def _run_all(jobs: list[Job], words: Sequence[str]) -> int:
    codes: list[int] = []
    runs: list[tuple[int, bool, str | None]] = []
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            warn(f"[{number}/{len(jobs)}] {' '.join(job.overrides)}", "")
        shown: list[str] = []
        codes.append(exit_code(partial(_run, job.config, words, shown)))  # after a failure the sweep continues
        runs.append((number, job.config.batch_invariant, shown[0] if shown else None))
    if len(jobs) > 1:
        from evalengine.report.sweep.sweep import agreement

        for line in agreement(runs):
            say(line)
    return max(codes)


def _run(config: Config, command: Sequence[str] | None = None, digests: list[str] | None = None) -> int:
    """Makes one run, with its report, table and digest, which is added to `digests`. command: the command line's
    words."""
    from evalengine.api.perform import perform
    from evalengine.report.terminal.run_table import print_report

    shown: list[str] = [] if digests is None else digests
    if config.model.api is not None:
        folder = perform(config, command)
        load("evalengine.integrations.endpoint.run:print_run")(folder)
        return 0
    perform(config, command, show=lambda folder: shown.append(print_report(folder)))
    return 0
