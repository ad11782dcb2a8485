"""A run's results for a model's `.eval_results/*.yaml` on the Hub, in the form of its page "Evaluation Results"
(huggingface/hub-docs of 2026-08-22: docs/hub/eval-results.md, eval_results.yaml)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from evalengine.errors import ConfigError, one_line
from evalengine.integrations.exports.files import HUB_ID
from evalengine.plain_text import warn
from evalengine.records.folder import TextFile
from evalengine.records.manifest_parts import Dataset, read_part
from evalengine.records.shapes import Text, with_fields, wrong
from evalengine.report.numbers import counted
from evalengine.report.read.load import RunData
from evalengine.report.read.run import Run, parsed
from evalengine.report.stats.metric_interval import cut_of
from evalengine.util.hub import offline_if_unreachable
from evalengine.util.plain_files import read_yaml
from evalengine.version import __version__

EVAL_YAML = "eval.yaml"  # a benchmark's list of its tasks, in its dataset's repository
ONLY_CONFIGURATION = "default"
_TASK = with_fields({"id": Text, "config?": Text, "split?": Text})
_BENCHMARK = with_fields({"tasks": list[_TASK]})  # type: ignore[valid-type]


def hub_results(data: RunData, target: Path) -> list[TextFile]:
    """The YAML of a model's `.eval_results/`, an entry per task with its first metric.

    Raises `ConfigError` for a run that is not ours, and if no task's rows are a dataset on the Hub.
    """
    check_kind(data.run, "--eval-results")
    entries = list(_hub_entries(data))
    if not entries:
        raise ConfigError(
            f"report: --eval-results: no task of {data.run.source} has its rows from a dataset on the Hub"
        )
    text = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)
    return [TextFile(target, text, counted(len(entries), "result"))]


def _hub_entries(data: RunData) -> Iterator[dict[str, Any]]:
    run, told = data.run, set[str]()
    for key, (value, _) in run.results.items():
        task, metric, name = key
        rows = run.manifest.datasets.get(task) or read_part(Dataset, None)
        if task in told or not math.isfinite(value) or not on_hub(rows.dataset):
            continue
        told.add(task)
        assert rows.dataset is not None
        dataset = {"id": rows.dataset, "task_id": _task_id(rows), **given(revision=rows.revision)}
        cut = cut_of(run, key)
        notes = (f"evalengine {run.manifest.code.version or __version__}", f"{metric}, {name}", few_shot(data, task),
                 f"{rows.rows} rows", f"numerics {run.identity.get('numerics')}", *([cut.words] if cut else []),
                 f"digest {run.digest}")  # fmt: skip
        yield {"dataset": dataset, "value": value, **given(date=_day(run)), "notes": "; ".join(notes)}


def _task_id(rows: Dataset) -> str:
    """The benchmark's task whose rows these are, by its eval.yaml; where that cannot be read, the name of the rows'
    configuration, which a warning tells to check."""
    configuration = rows.name or ONLY_CONFIGURATION
    try:
        tasks = _benchmark(str(rows.dataset))
    except (OSError, ValueError) as error:
        warn(f"{rows.dataset}: its {EVAL_YAML} cannot be read ({one_line(error)}): task_id {configuration} is the name "
             "of its configuration; set it to the task's id there")  # fmt: skip
        return configuration
    fitting = [task for task in tasks if task.get("config", ONLY_CONFIGURATION) == configuration] or tasks
    fitting = [task for task in fitting if task.get("split", "test") == rows.split] or fitting
    if len(fitting) != 1:
        names = ", ".join(task["id"] for task in fitting)
        warn(f"{rows.dataset}: its {EVAL_YAML} has several tasks for {configuration} ({names}): the first is written")
    return fitting[0]["id"]


def _benchmark(dataset: str) -> list[dict[str, str]]:
    """The tasks of a benchmark on the Hub. Raises OSError or ValueError if there is none, or it cannot be had."""
    from huggingface_hub import hf_hub_download

    with offline_if_unreachable():
        value = read_yaml(Path(hf_hub_download(dataset, EVAL_YAML, repo_type="dataset")))
    if (problem := wrong(value, _BENCHMARK)) or not value["tasks"]:
        raise ValueError(problem or "it has no tasks")
    tasks: list[dict[str, str]] = value["tasks"]
    return tasks


def check_kind(run: Run, option: str) -> None:
    """Raises ConfigError for a run without a manifest."""
    if run.kind != "run":
        raise ConfigError(f"report: {option}: {run.source} is no run of evalengine's own, whose manifest names model "
                          "and rows; give the run's folder")  # fmt: skip


def few_shot(data: RunData, task: str) -> str:
    """`5-shot`."""
    return f"{data.results.get('n-shot', {}).get(task, 'unknown')}-shot"


def on_hub(path: str | None) -> bool:
    """Whether it is the id of a repository on the Hub."""
    return path is not None and "/" in path and HUB_ID.fullmatch(path) is not None


def _day(run: Run) -> str | None:
    started = parsed(run.manifest.started)
    return None if started is None else started.date().isoformat()


def given(**values: Any) -> dict[str, Any]:
    """What is known."""
    return {name: value for name, value in values.items() if value is not None}
