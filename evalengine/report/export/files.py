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
from evalengine.records.folder import write_text_file
from evalengine.records.manifest_parts import Dataset, read_part
from evalengine.report.leaderboard.models import labels
from evalengine.report.python.results import samples_frame
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.run import Run
from evalengine.report.stats.metric_interval import cut_of
from evalengine.util.plain_files import YAML_SUFFIXES

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASK_TYPE = "text-generation"  # the Hub's pipeline of causal language models
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def write_samples(run: Run, target: Path) -> int:
    """Writes the columns of `results.samples_frame`, whole or not at all; returns how many rows they have.

    A text is a cell as it is; lists and what a dataset's row holds are JSON; what a task has no metric for is empty.
    Lines end as RFC 4180 has them, so that both of their characters are quoted where a text holds them.

    Raises `ConfigError` for another ending than .csv, and for a baseline, which holds no samples; `EvalEngineError` if
    the disk refuses.
    """
    if target.suffix != ".csv":
        raise ConfigError(f"report: --samples {target}: is CSV: name a file that ends in .csv")
    if run.kind == "baseline":
        raise ConfigError(f"report: --samples: {run.source} is a baseline, which holds no texts; give the run's folder")
    _, samples = newest(run.source)
    frame = samples_frame(samples, run.cut)
    for name in [name for name in frame if frame[name].dtype.kind == "O"]:
        frame[name] = frame[name].map(_cell)
    write_text_file(target, frame.to_csv(index=False, lineterminator="\r\n"))
    return len(frame)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def write_model_index(run: Run, target: Path) -> int:
    """Writes the YAML file, whole or not at all; returns how many results it holds.

    Raises `ConfigError` for another ending than .yaml, and for a run without finite results; `EvalEngineError` if the
    disk refuses.
    """
    if target.suffix not in YAML_SUFFIXES:
        raise ConfigError(f"report: --model-index {target}: is YAML: name a file that ends in .yaml; its content goes "
                          "between the --- lines at the top of the model card")  # fmt: skip
    from huggingface_hub import ModelCardData

    results = list(eval_results(run))
    if not results:
        raise ConfigError(f"report: --model-index: {run.source} holds no finite results")
    data = ModelCardData(model_name=labels([run])[0], eval_results=results)
    write_text_file(target, data.to_yaml() + "\n")
    return len(results)


def eval_results(run: Run) -> Iterator[EvalResult]:
    """A result per task, metric and filter whose value is finite. Shares stay shares of 1, not percent.

    Raises `ConfigError` for a baseline, which does not say what its datasets are.
    """
    if run.kind == "baseline":
        raise ConfigError(f"report: --model-index: {run.source} is a baseline, which does not name its datasets; give "
                          "the run's folder")  # fmt: skip
    from huggingface_hub import EvalResult

    results, _ = newest(run.source)
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
