"""A run's results in files for other programs: a CSV of its samples, and the Hub's `model-index`, YAML for the front
matter of a model card, which shows the results.

The index has the format of huggingface_hub's own `ModelCardData`, which writes it here and reads it back in the tests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.errors import ConfigError
from evalengine.records.folder import TextFile
from evalengine.records.manifest_parts import Dataset, read_part
from evalengine.report.leaderboard.models import labels
from evalengine.report.numbers import counted
from evalengine.report.python.results import samples_frame
from evalengine.report.read.load import RunData
from evalengine.report.read.run import Run
from evalengine.report.stats.metric_interval import cut_of

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASK_TYPE = "text-generation"  # the Hub's pipeline of causal language models
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


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
    """Which rows: the Hub's id where they have one, else the task's name. A path of this machine is nobody's."""
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
