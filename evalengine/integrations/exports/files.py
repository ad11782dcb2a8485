"""A run's results in files for other programs: a CSV of its samples, and two YAML files of the Hub: `model-index`, the
front matter of a model card, and a model's `.eval_results/*.yaml`.

The index has the format of huggingface_hub's own `ModelCardData`, which writes it here and reads it back in the tests;
the results have that of the page "Evaluation Results" (huggingface/hub-docs of 2026-08-22: docs/hub/eval-results.md,
eval_results.yaml).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evalengine.errors import ConfigError, one_line
from evalengine.plain_text import warn
from evalengine.records.folder import TextFile
from evalengine.records.manifest_data import Dataset, read_part
from evalengine.records.shapes import Text, with_fields, wrong
from evalengine.report.leaderboard.models import labels
from evalengine.report.numbers import counted
from evalengine.report.python.results import samples_frame
from evalengine.report.read.run import Run, RunData, parsed
from evalengine.report.stats.metric_interval import cut_of
from evalengine.util.hub import offline_if_unreachable
from evalengine.util.plain_files import read_yaml
from evalengine.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASK_TYPE = "text-generation"  # the Hub's pipeline of causal language models
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
EVAL_YAML = "eval.yaml"  # a benchmark's list of its tasks, in its dataset's repository
ONLY_CONFIGURATION = "default"
_TASK = with_fields({"id": Text, "config?": Text, "split?": Text})
_BENCHMARK = with_fields({"tasks": list[_TASK]})  # type: ignore[valid-type]


def samples_csv(data: RunData, target: Path) -> list[TextFile]:
    """The columns of `results.samples_frame`.

    A text is a cell as it is; lists and what a dataset's row holds are JSON; what a task has no metric for is empty.
    Lines end as RFC 4180 has them, so that both of their characters are quoted where a text holds them.
    """
    samples = {task: [row for rows in documents.values() for row in rows] for task, documents in data.samples.items()}
    frame = samples_frame(samples, data.run.cut)
    for name in [name for name in frame if frame[name].dtype.kind == "O"]:
        frame[name] = frame[name].map(_cell)
    return [TextFile(target, frame.to_csv(index=False, lineterminator="\r\n"), counted(len(frame), "sample"))]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def model_index(data: RunData, target: Path) -> list[TextFile]:
    """The YAML that goes between the --- lines at the top of a model card. Raises `ConfigError` for a run without
    finite results."""
    from huggingface_hub import ModelCardData

    results = list(_eval_results(data))
    if not results:
        raise ConfigError(f"report: --model-index: {data.run.source} holds no finite results")
    card = ModelCardData(model_name=labels([data.run])[0], eval_results=results)
    return [TextFile(target, card.to_yaml() + "\n", counted(len(results), "result"))]


def _eval_results(data: RunData) -> Iterator[EvalResult]:
    """A result per task, metric and filter whose value is finite. Shares stay shares of 1, not percent."""
    from huggingface_hub import EvalResult

    run, results = data.run, data.results
    for (task, metric, name), (value, stderr) in run.results.items():
        if not math.isfinite(value):
            continue
        facts = {"filter": name, "num_few_shot": results["n-shot"].get(task), "stderr": stderr, "digest": run.digest}
        facts["documents"] = (results["n-samples"].get(task) or {}).get("effective")
        if (cut := cut_of(run, (task, metric, name))) is not None:
            facts["cut_at_the_limit"] = cut.words
        yield EvalResult(
            task_type=TASK_TYPE,
            task_name="Text Generation",
            **_dataset(run, task, results["configs"].get(task) or {}),
            metric_type=metric,
            metric_name=f"{task} {metric}" + ("" if name == "none" else f" ({name})"),
            metric_value=value,
            metric_args={key: value for key, value in facts.items() if value is not None},
        )


def _dataset(run: Run, task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which rows: the Hub's id where they have one, else the task's name. A local path means nothing elsewhere."""
    mine = run.manifest.datasets.get(task) or read_part(Dataset, None)
    path = mine.dataset or config.get("dataset_path")
    on_hub = isinstance(path, str) and HUB_ID.fullmatch(path) is not None
    name = mine.name or config.get("dataset_name")
    return {
        "dataset_name": task,
        "dataset_type": path if on_hub else task,
        "dataset_config": name if on_hub else None,
        "dataset_split": mine.split or config.get("test_split") or config.get("validation_split"),
        "dataset_revision": mine.revision if on_hub else None,
    }


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
    run, listed_tasks = data.run, set[str]()
    for key, (value, _) in run.results.items():
        task, metric, name = key
        rows = run.manifest.datasets.get(task) or read_part(Dataset, None)
        if task in listed_tasks or not math.isfinite(value) or not on_hub(rows.dataset):
            continue
        listed_tasks.add(task)
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
    """The values that are known."""
    return {name: value for name, value in values.items() if value is not None}
