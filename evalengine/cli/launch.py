"""Runs a sweep as jobs of SLURM: `hydra/launcher=submitit_slurm`, with the settings of Hydra's plugin.

    python -m evalengine -m hydra/launcher=submitit_slurm hydra.launcher.partition=gpu hydra.launcher.gpus_per_node=1 \\
        task=gsm8k model.path=./a,./b

The plugin's own launcher would run Hydra's application, which this package does not have, so that its settings go to
submitit directly. `submitit_local` runs the jobs as processes of this machine, as a rehearsal of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from evalengine.api.perform import perform
from evalengine.config.compose import Job
from evalengine.errors import ConfigError
from evalengine.plain_text import say, warn
from evalengine.util.command import exit_code

EXECUTORS = {"LocalLauncher": "local", "SlurmLauncher": "slurm"}  # the plugin's classes -> submitit's names
EXECUTOR_SETTINGS = ("max_num_timeout",)  # settings of submitit's executor, not of each job
NOT_OF_JOBS = ("_target_", "submitit_folder", *EXECUTOR_SETTINGS)


@dataclass(frozen=True)
class RunJob:
    """One run, as submitit pickles and starts it."""

    job: Job
    command: Sequence[str]

    def __call__(self) -> int:
        """Makes the run; returns its exit code. Table and digest lie in its folder, messages in the job's log."""
        return exit_code(self._perform)

    def _perform(self) -> int:
        say(perform(self.job.config, self.command))
        return 0

    def checkpoint(self) -> Any:
        """Queues a job again that SLURM preempted or timed out; submitit calls this, and the run resumes."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def submit(jobs: Sequence[Job], command: Sequence[str]) -> int:
    """Runs the jobs by the launcher that they name, as many at once as its `array_parallelism` allows; waits for all
    and returns the worst exit code.

    Raises ConfigError for a launcher that is not submitit's, and on a machine that SLURM does not know.
    """
    import submitit

    settings = jobs[0].launcher or {}
    try:
        executor = submitit.AutoExecutor(**executor_settings(settings))
    except RuntimeError as error:  # this machine has no srun
        raise ConfigError(f"hydra/launcher=submitit_slurm: {error}") from error
    executor.update_parameters(**job_settings(settings))
    with executor.batch():
        submitted = [executor.submit(RunJob(job, command)) for job in jobs]
    for job, sent in zip(jobs, submitted, strict=True):
        warn(f"job {sent.job_id}: {' '.join(job.overrides)}; log {sent.paths.stderr}", "")
    codes = [_result(sent) for sent in submitted]
    return max(codes)


def executor_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that submitit's executor is made with."""
    name = _executor(settings)
    own = {f"{name}_{key}": settings[key] for key in EXECUTOR_SETTINGS if key in settings}
    return {"cluster": name, "folder": settings["submitit_folder"], **own}


def job_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of each job. Those that not all executors know have the executor's name before theirs."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    name, common = _executor(settings), {item.name for item in fields(BaseQueueConf)}
    mine = {key: value for key, value in settings.items() if key not in NOT_OF_JOBS}
    return {key if key in common else f"{name}_{key}": value for key, value in mine.items()}


def _executor(settings: Mapping[str, Any]) -> str:
    target = str(settings.get("_target_", "")).rpartition(".")[2]
    if target not in EXECUTORS:
        raise ConfigError(f"hydra/launcher: {target or 'it'} is not built; take submitit_slurm or submitit_local")
    return EXECUTORS[target]


def _result(sent: Any) -> int:
    """A job's exit code; a job that the cluster ended has 1."""
    try:
        return int(sent.result())
    except Exception as error:  # submitit raises for jobs that were cancelled, killed or never started
        warn(f"job {sent.job_id}: {str(error).splitlines()[-1]}; log {sent.paths.stderr}")
        return 1
