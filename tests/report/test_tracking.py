"""`log_to=`: what reaches W&B and MLflow; the real libraries take it where they are installed, else doubles do."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.config.check import tracker_problems
from evalengine.config.compose import compose_jobs
from evalengine.errors import ConfigError
from evalengine.integrations.exports.tracking import leave_log, log_run, metrics_of, settings_of
from evalengine.report.read.load import load_run
from tests.e2e.command import installed
from tests.run_double import bind_again, generated, write_run

METRICS = {"sums/exact_match/strict": pytest.approx(1 / 3), "sums/exact_match/flexible": pytest.approx(1 / 3)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path / "a_run", [generated(doc) for doc in range(6)])
    bind_again(path, model={"name": "m"}, engine={"max_num_seqs": 8, "stats": {"seconds": 1}}, numerics="exact")
    return path


@pytest.fixture
def mlflow_double(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that a double of MLflow took; it has the names and argument names of MLflow 3."""
    calls: list[tuple[Any, ...]] = []
    double: Any = ModuleType("mlflow")
    double.__spec__ = ModuleSpec("mlflow", None, origin="double")
    double.active_run = lambda: None
    double.set_experiment = lambda name: calls.append(("experiment", name))
    double.start_run = lambda run_name: SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    double.log_metrics = lambda metrics: calls.append(("metrics", metrics))
    double.log_params = lambda params: calls.append(("params", params))
    double.set_tags = lambda tags: calls.append(("tags", tags))
    double.log_artifact = lambda path, artifact_path: calls.append(("file", Path(path).name))
    double.end_run = lambda status: calls.append(("end", status))
    monkeypatch.setitem(sys.modules, "mlflow", double)
    return calls


def test_metrics_digest_and_settings_are_logged(folder: Path) -> None:
    run = load_run(folder)
    assert metrics_of(run) == METRICS
    settings = settings_of(run)
    assert settings["digest"] == run.digest and settings["engine.max_num_seqs"] == 8 and settings["model.name"] == "m"
    assert not any("stats" in name for name in settings)


def test_names_that_mlflow_refuses_are_mended(folder: Path) -> None:
    run = load_run(folder)
    run.results["t", "m", "a,b(c)"] = (1.0, 0.5)
    assert {"t/m/a_b_c_": 1.0, "t/m_stderr/a_b_c_": 0.5}.items() <= metrics_of(run).items()


def test_mlflow_gets_metrics_settings_and_small_files(folder: Path, mlflow_double: list[tuple[Any, ...]]) -> None:
    assert main(["report", str(folder), "--log-to", "mlflow"]) == 0
    calls = {name: value for name, value in mlflow_double if name != "file"}
    assert calls["metrics"] == METRICS and calls["end"] == "FINISHED" and calls["experiment"] == "evalengine"
    assert calls["params"]["engine.max_num_seqs"] == "8"
    files = {value for name, value in mlflow_double if name == "file"}
    assert {"manifest.json", "digest.txt"} <= files and not any(name.startswith("samples") for name in files)


def test_an_active_run_stays_open(folder: Path, mlflow_double: list[tuple[Any, ...]]) -> None:
    sys.modules["mlflow"].active_run = lambda: SimpleNamespace(info=SimpleNamespace(run_id="mine"))  # type: ignore[attr-defined]
    assert log_run(load_run(folder), "mlflow") == "logged to mlflow: run mine"
    assert {"end", "params", "experiment"}.isdisjoint({name for name, _ in mlflow_double})


def test_a_tracker_that_refuses_does_not_fail_the_run(
    folder: Path, mlflow_double: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(metrics: object) -> None:
        raise OSError("no route")

    sys.modules["mlflow"].log_metrics = refuse  # type: ignore[attr-defined]
    leave_log(folder, "mlflow")
    err = capsys.readouterr().err
    assert "the run is not logged (OSError: no route); the run is whole; try again: python -m evalengine report" in err
    assert mlflow_double[-1] == ("end", "FAILED")
    assert main(["report", str(folder), "--log-to", "mlflow"]) == 1


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("evalengine.util.plugins.find_spec", lambda name: None)
    (problem,) = tracker_problems("log_to", "wandb")
    assert problem == "log_to=wandb: wandb is not installed: pip install 'evalengine[wandb]'"
    with pytest.raises(ConfigError) as refused:
        compose_jobs(["log_to=wandb", "limit=0"])
    assert refused.value.problems == ["limit=0: must be greater than or equal to 1", problem]
    assert main(["report", str(folder), "--log-to", "wandb"]) == 2


def test_a_folder_called_wandb_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("evalengine.config.check.TRACKERS", ("no_such_tracker",))
    assert "is not installed" in next(iter(tracker_problems("log_to", "no_such_tracker")))


def test_another_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_to=tensorboard: must be one of wandb, mlflow"):
        compose_jobs(["log_to=tensorboard"])


def test_a_package_adds_a_tracker_by_an_entry_point(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def log(run):\n    return f'{run.digest} is on my board'\n"
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "evalengine.exports", "my_board", "log", source))
    (job,) = compose_jobs(["log_to=my_board"])
    leave_log(folder, job.config.log_to)
    assert f"{load_run(folder).digest} is on my board" in capsys.readouterr().err
    assert main(["report", str(folder), "--log-to", "my_board"]) == 0
    assert "is on my board" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="must be one of wandb, mlflow, my_board"):
        compose_jobs(["log_to=my_bord"])


def test_mlflow_itself_takes_the_log(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    assert log_run(load_run(folder), "mlflow").startswith("logged to mlflow: run ")
    (run,) = mlflow.search_runs(experiment_names=["evalengine"], output_format="list")
    assert run.data.metrics == METRICS and run.info.status == "FINISHED"
    assert run.data.params["digest"] == run.data.tags["evalengine.digest"] == load_run(folder).digest
    names = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id, "evalengine")}
    assert "evalengine/manifest.json" in names


def test_wandb_itself_takes_the_log(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb.sdk", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert log_run(load_run(folder), "wandb").startswith("logged to wandb: ")
    (left,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = left.read_bytes()
    assert b"sums/exact_match/strict" in written and str(load_run(folder).digest).encode() in written
