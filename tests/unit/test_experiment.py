"""`experiment=`: what a file sweeps, what the command line overrides, and how an unfinished sweep is taken up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.__main__ import main
from evalengine.cli import experiment
from evalengine.config.compose import Job, compose_jobs, experiment_name
from evalengine.config.schema import Config
from evalengine.errors import ConfigError, EvalEngineError

NAME = "noise_floor"
TWO_RUNS = (f"experiment={NAME}", "engine.max_num_seqs=4")  # Invariant and not.
SMALL = ("limit=2", "engine.device=cpu", "engine.max_num_seqs=1,4")


def jobs(output_dir: Path, *overrides: str) -> list[Job]:
    """The shipped experiment's jobs, made small: two modes and two batch sizes."""
    return [replace(job, config=replace(job.config, output_dir=str(output_dir))) for job in composed(*overrides)]


@functools.cache
def composed(*overrides: str) -> list[Job]:
    """The jobs in the default output folder. Hydra composes each anew, which takes a second for all of them."""
    return compose_jobs([f"experiment={NAME}", *SMALL, *overrides])


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders for which a report was asked; the report itself is tested with real runs."""
    seen: list[Path] = []

    def report(name: str, folder: Path, jobs: Sequence[Job], places: Sequence[Path]) -> int:
        seen.append(folder)
        (folder / f"{name}.json").write_text("{}")
        return 0

    monkeypatch.setattr(experiment, "_report", report)
    return seen


def runner(
    ran: list[Config], fail: Callable[[Config], BaseException | None] = lambda c: None
) -> Callable[[Config], int]:
    """A runner that notes each configuration in `ran`, then raises what `fail` returns or leaves a finished run."""

    def run(config: Config) -> int:
        ran.append(config)
        if (error := fail(config)) is not None:
            raise error
        folder = Path(config.output_dir) / "run"
        folder.mkdir(parents=True)
        (folder / "digest.txt").write_text("0\n")
        return 0

    return run


def test_the_file_sweeps_and_the_command_line_overrides() -> None:
    whole = compose_jobs([f"experiment={NAME}"])
    cells = [(job.config.batch_invariant, job.config.engine.max_num_seqs) for job in whole]
    assert cells == [(mode, size) for mode in (True, False) for size in (1, 8, 64)]
    assert [experiment.label(job) for job in whole][4] == "batch_invariant=False,max_num_seqs=8"
    overridden = compose_jobs([f"experiment={NAME}", "engine.max_num_seqs=16", "seed=1,2"])
    assert [(j.config.batch_invariant, j.config.engine.max_num_seqs, j.config.seed) for j in overridden] == [
        (True, 16, 1), (True, 16, 2), (False, 16, 1), (False, 16, 2)
    ]  # fmt: skip


def test_a_user_writes_another_experiment(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "dtypes.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /task: arc_easy\nlimit: 5\n"
        "hydra: {sweeper: {params: {engine.dtype: 'bfloat16,float32'}}}\n"
    )
    swept = compose_jobs([f"hydra.searchpath=[file://{tmp_path}]", "experiment=dtypes"])
    assert [(list(j.config.tasks), j.config.limit, j.config.engine.dtype) for j in swept] == [
        (["arc_easy"], 5, "bfloat16"), (["arc_easy"], 5, "float32")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=noise_flor"], "experiment=noise_flor: no such experiment; did you mean noise_floor?"),
        (["experiment=noise_floor,other"], "name one experiment"),
        ([*TWO_RUNS, "numerics=exact"], "batch_invariant=false contradicts numerics=exact"),
        (["experiment=noise_floor", "engine.max_num_seqs=4", "batch_invariant=true"], "one run is no sweep"),
        (["experiment=noise_floor", "engine.max_num_seqs=1,0"], "engine.max_num_seqs=0: must be greater than or equal"),
        ([*TWO_RUNS, "model.path=/nowhere/x"], "/nowhere/x"),
        ([*TWO_RUNS, "resume=."], "an experiment takes auto or never"),
        ([*TWO_RUNS, "engine.max_model_len=512,99999", "engine.device=cpu"],
         "max_model_len=99999: engine.max_model_len=99999: must be in"),
    ],
)  # fmt: skip
def test_bad_settings_fail_before_the_first_run(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalengine.cli.run.run_one", lambda config: pytest.fail("it ran"))
    assert main([*words, f"output_dir={tmp_path / 'out'}"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_every_run_has_a_folder_of_its_own(tmp_path: Path, reported: list[Path]) -> None:
    ran: list[Config] = []
    assert experiment.run_experiment(NAME, jobs(tmp_path), runner(ran)) == 0
    (folder,) = reported
    assert [Path(config.output_dir) for config in ran] == [
        folder / f"{n}-batch_invariant_{mode}_max_num_seqs_{size}"
        for n, (mode, size) in enumerate([(True, 1), (True, 4), (False, 1), (False, 4)], 1)
    ]
    assert [config.engine.max_num_seqs for config in ran] == [1, 4, 1, 4]


def test_a_failed_run_fails_the_sweep_and_only_it_runs_again(
    tmp_path: Path, reported: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Config] = []
    fail = runner(ran, lambda c: EvalEngineError("no") if not c.batch_invariant and len(ran) < 4 else None)
    assert experiment.run_experiment(NAME, jobs(tmp_path), fail) == 1
    assert len(ran) == 4 and not reported and "1 of 4 runs failed" in capsys.readouterr().err
    assert experiment.run_experiment(NAME, jobs(tmp_path), runner(ran)) == 0
    assert len(ran) == 5 and not ran[4].batch_invariant and ran[4].engine.max_num_seqs == 1
    assert ran[4].output_dir == ran[2].output_dir and capsys.readouterr().err.count("finished before") == 3


def test_an_interrupt_ends_the_sweep_and_the_next_takes_it_up(tmp_path: Path, reported: list[Path]) -> None:
    ran: list[Config] = []
    with pytest.raises(KeyboardInterrupt):
        experiment.run_experiment(
            NAME, jobs(tmp_path), runner(ran, lambda c: KeyboardInterrupt() if len(ran) == 2 else None)
        )
    assert experiment.run_experiment(NAME, jobs(tmp_path), runner(ran)) == 0
    assert len(ran) == 5 and ran[2].output_dir == ran[1].output_dir and len(list(tmp_path.iterdir())) == 1


def test_what_is_finished_or_another_sweep_is_not_taken_up(tmp_path: Path, reported: list[Path]) -> None:
    ran: list[Config] = []

    def sweep(*overrides: str) -> None:
        assert experiment.run_experiment(NAME, jobs(tmp_path, *overrides), runner(ran)) == 0

    sweep()
    (reported[0] / f"{NAME}.json").unlink()
    sweep("seed=5")
    assert len(ran) == 8 and reported[1] != reported[0], "other settings"
    sweep()
    assert len(ran) == 8 and reported[2] == reported[0], "all of it was there"
    (reported[0] / f"{NAME}.json").unlink()
    reported[0].rename(tmp_path / reported[0].name.replace("-2", "-1", 1))  # the name says an earlier time
    sweep("resume=never")
    assert len(ran) == 12


def test_nothing_is_kept_of_a_job_without_a_digest(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert experiment.finished_run(tmp_path) is None
    (tmp_path / "run" / "digest.txt").write_text("0\n")
    assert experiment.finished_run(tmp_path) == tmp_path / "run"


@pytest.mark.parametrize("words", [[f"experiment={NAME}", "experiment=other"], [f"experiment=[{NAME}]"]])
def test_a_name_is_one_word(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="experiment"):
        compose_jobs(words)


def test_quotes_are_the_grammars_not_the_names() -> None:
    for word in (NAME, f"'{NAME}'", f'"{NAME}"', f" {NAME}"):
        assert experiment_name([f"experiment={word}"]) == NAME
    assert experiment_name(["limit=2"]) is None


def test_an_experiment_in_a_folder_of_its_group_ends_like_any(tmp_path: Path, reported: list[Path]) -> None:
    assert experiment.run_experiment("mine/short", jobs(tmp_path), runner([])) == 0
    assert [path.name for path in reported[0].glob("*.json")] == ["mine_short.json"]


def test_settings_whose_names_end_alike_stay_apart() -> None:
    overrides = ("tasks.a.num_fewshot=0", "tasks.b.num_fewshot=5", "engine.max_num_seqs=8")
    assert experiment.label(Job(overrides, Config())) == ",".join(overrides[:2]) + ",max_num_seqs=8"
