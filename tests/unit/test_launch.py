"""`hydra/launcher=submitit_slurm`: the plugin's settings compose, and submitit receives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.cli.launch import executor_settings, job_settings
from evalengine.config.compose import Job, compose_jobs
from evalengine.errors import ConfigError
from tests.e2e.command import finish, runs, start

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs pip install 'evalengine[slurm]'")
SLURM = "hydra/launcher=submitit_slurm"


def swept(*words: str) -> list[Job]:
    """The jobs of a sweep over two seeds."""
    return compose_jobs([*words, "seed=0,1", "output_dir=out"], multirun=True)


def test_what_slurm_is_asked_for() -> None:
    words = ("partition=gpu", "gpus_per_node=8", "timeout_min=90", "array_parallelism=4", "max_num_timeout=3")
    jobs = swept(SLURM, *(f"hydra.launcher.{word}" for word in words))
    assert [job.config.seed for job in jobs] == [0, 1] and jobs[0].launcher == jobs[1].launcher
    launcher = jobs[0].launcher
    assert launcher is not None
    assert executor_settings(launcher) == {
        "cluster": "slurm", "folder": "out/.submitit/%j", "slurm_max_num_timeout": 3,
    }  # fmt: skip
    parameters = job_settings(launcher)
    assert parameters["timeout_min"] == 90 and parameters["gpus_per_node"] == 8 and parameters["name"] == "evalengine"
    assert parameters["slurm_partition"] == "gpu" and parameters["slurm_array_parallelism"] == 4
    assert not {"_target_", "submitit_folder", "slurm_max_num_timeout"} & parameters.keys()


def test_a_sweep_without_a_launcher_has_none() -> None:
    assert [job.launcher for job in swept()] == [None, None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hydra/launcher=joblib",), "hydra/launcher=joblib: must be one of submitit_slurm, submitit_local"),
        ((SLURM, "hydra.launcher.partitoin=gpu"), "partitoin"),
        ((SLURM, "hydra.sweep.dir=x"), "Hydra's own settings have no effect here"),
        ((SLURM, "experiment=noise_floor"), "an experiment compares its runs"),
    ],
)
def test_what_cannot_be_launched_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swept(*words)


def test_one_run_is_no_sweep() -> None:
    with pytest.raises(ConfigError, match="launches the runs of a sweep; add -m"):
        compose_jobs([SLURM])


def test_a_machine_without_slurm_says_so(tmp_path: Path) -> None:
    """In a process of its own: submitit, when imported, closes the log handlers of the whole process, and absl's (which
    lm-eval's metrics load) then closes pytest's standard error."""
    done = finish(start("-m", SLURM, "seed=0,1", f"output_dir={tmp_path / 'out'}", PATH=str(tmp_path)))
    assert done.code == 2 and done.err.startswith("evalengine: hydra/launcher=submitit_slurm: Could not detect")


@pytest.mark.slow
def test_jobs_run_and_leave_their_folders(tmp_path: Path) -> None:
    """The jobs are processes of this machine, started by the same code that starts SLURM's."""
    few = ("limit=2", "engine.device=cpu", "task.generation.max_gen_toks=3")
    done = finish(start("-m", "hydra/launcher=submitit_local", "seed=0,1", f"output_dir={tmp_path}", *few))
    assert done.code == 0, done.err
    assert sorted(run.manifest["identity"]["seed"] for run in runs(tmp_path) if run.folder.name != ".submitit") == [
        0,
        1,
    ]
    bad = finish(start("-m", "hydra/launcher=submitit_local", "data_dir=/nowhere,/neither", f"output_dir={tmp_path}"))
    assert bad.code == 2, "refused before anything is submitted"
