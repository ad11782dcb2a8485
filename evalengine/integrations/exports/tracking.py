"""A finished run in a tracker of experiments: Weights & Biases or MLflow, by their own libraries, or another one, by
an entry point of the group `evalengine.exports`: a function that takes the `Run` and returns where it is, in words.

Logged are the metrics with their standard errors (`task/metric/filter`), what the run was made of, its digest, and its
small files. A run that is active already, as in a training, takes the metrics and stays open; else one is made, and
ended. The libraries' own settings say where it goes: WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, ...
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evalengine.config.check import EXPORTS
from evalengine.errors import EvalEngineError
from evalengine.plain_text import warn
from evalengine.records.folder import DIGEST
from evalengine.records.manifest_data import MANIFEST
from evalengine.report.leaderboard.models import labels
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Run
from evalengine.util.plugins import added

PROJECT = "evalengine"  # the W&B project and MLflow experiment, where their own settings name none
FILES = ("results_*.json", "config.yaml", MANIFEST, DIGEST)  # not samples and pages, which hold a dataset's own texts
_FORBIDDEN = re.compile(r"[^\w\-. /:]")  # in a metric's name in MLflow
LONGEST = 500  # characters of a parameter's value in MLflow


def leave_log(folder: Path, tracker: str) -> None:
    """Logs a run that has just finished. A failure is only printed, since the run is whole without its entry."""
    try:
        warn(log_run(load_run(folder), tracker))
    except EvalEngineError as error:
        fix = f"the run is whole; try again: python -m evalengine report {folder} --log-to {tracker}"
        warn(f"{error}; {fix}")


def log_run(run: Run, tracker: str) -> str:
    """Log a finished run to a tracker that `tracker_problems` accepts; return where it is, in words. Raises
    `EvalEngineError` if the tracker refuses."""
    ours: dict[str, Callable[[Run], str]] = {"wandb": _to_wandb, "mlflow": _to_mlflow}
    try:
        log = ours[tracker] if tracker in ours else added(EXPORTS)[tracker].load()
        return str(log(run))
    except Exception as error:  # another library may raise anything: no network, no account, a full disk
        if os.environ.get("EVALENGINE_DEBUG"):
            traceback.print_exc()
        raise EvalEngineError(f"{tracker}: the run is not logged ({type(error).__name__}: {error})") from error


def metrics_of(run: Run) -> dict[str, float]:
    """Values by `task/metric/filter`, and standard errors by the same with `_stderr`; a filter `none` is left out."""
    values = {}
    for (task, metric, name), (value, stderr) in run.results.items():
        end = "" if name == "none" else f"/{name}"
        values[_FORBIDDEN.sub("_", f"{task}/{metric}{end}")] = value
        if stderr is not None:
            values[_FORBIDDEN.sub("_", f"{task}/{metric}_stderr{end}")] = stderr
    return values


def settings_of(run: Run) -> dict[str, Any]:
    """The run's configuration, by dotted names: model, engine, the settings that can change a result, its digest."""
    manifest = run.manifest
    chosen = ("limit", "seed", "apply_chat_template", "dtype", "contract_version")
    whole = {name: run.identity.get(name) for name in chosen}
    tasks = run.identity.get("tasks")
    for task, settings in tasks.items() if isinstance(tasks, Mapping) else ():
        whole[f"tasks.{task}"] = {name: settings.get(name) for name in ("version", "num_fewshot")}
    model, code = manifest.content.get("model"), manifest.content.get("code")
    parts = {"model": model, "engine": manifest.engine_settings, "code": code}
    names = {"run_id": manifest.run_id, "numerics": manifest.numerics, "digest": run.digest}
    return dict(_flat({**names, **whole, **parts}))


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{above}{name}.")
        elif inner is not None:
            yield f"{above}{name}", inner


def _files(run: Run) -> list[Path]:
    return [file for pattern in FILES for file in sorted(run.folder.glob(pattern))]


def _to_wandb(run: Run) -> str:
    import wandb

    active = wandb.run
    name = run.source.resolve().name
    project = None if os.environ.get("WANDB_PROJECT") else PROJECT
    entry = active or wandb.init(project=project, name=name, job_type="evaluation", config=settings_of(run))
    try:
        entry.log(metrics_of(run))
        entry.summary["digest"] = run.digest
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", name)[:120], type="evaluation", metadata=settings_of(run))
        for file in _files(run):
            artifact.add_file(str(file))
        entry.log_artifact(artifact)
        return f"logged to wandb: {entry.url or entry.dir}"
    finally:
        if active is None:
            entry.finish()


def _to_mlflow(run: Run) -> str:
    import mlflow

    active = mlflow.active_run()
    if active is None and not (os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID")):
        mlflow.set_experiment(PROJECT)
    entry = active or mlflow.start_run(run_name=run.source.resolve().name)
    status = "FAILED"
    try:
        mlflow.log_metrics(metrics_of(run))
        if active is None:  # a training's parameters are its own
            mlflow.log_params({name: str(value)[:LONGEST] for name, value in settings_of(run).items()})
        mlflow.set_tags({"evalengine.digest": run.digest or "", "evalengine.model": labels([run])[0]})
        for file in _files(run):
            mlflow.log_artifact(str(file), artifact_path="evalengine")
        status = "FINISHED"
        return f"logged to mlflow: run {entry.info.run_id}"
    finally:
        if active is None:
            mlflow.end_run(status)
