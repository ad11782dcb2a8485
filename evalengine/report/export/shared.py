"""A run's results for places that collect them: the Hub's `.eval_results/*.yaml`, and Every Eval Ever's record.

The Hub's form is that of its page "Evaluation Results" (huggingface/hub-docs, docs/hub/eval-results.md), the other that
of evaleval/every_eval_ever's eval.schema.json, version 0.3.0.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from evalengine.errors import ConfigError
from evalengine.records.folder import write_text_file
from evalengine.records.lm_eval_file import read_results, results_files
from evalengine.records.manifest_parts import Dataset, read_part
from evalengine.report.export.files import HUB_ID
from evalengine.report.read.provenance import parsed
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.mean_interval import CONFIDENCE
from evalengine.report.stats.metric_interval import metric_interval
from evalengine.util.plain_files import YAML_SUFFIXES
from evalengine.version import __version__

SCHEMA = "0.3.0"  # of Every Eval Ever
ONLY_TASK = "default"  # the Hub's task of a dataset that has one configuration
Details = dict[str, str]


def write_hub_results(run: Run, target: Path) -> int:
    """Writes the YAML of a model's `.eval_results/`, an entry a task with its first metric; returns how many there are.

    Raises `ConfigError` for another ending than .yaml, for a baseline, and where no task's rows are a dataset on the
    Hub; `EvalEngineError` if the disk refuses.
    """
    _check(run, target, YAML_SUFFIXES, "--eval-results", "YAML: name a file that ends in .yaml, for .eval_results/")
    entries = list(_hub_entries(run))
    if not entries:
        raise ConfigError(f"report: --eval-results: no task of {run.source} has its rows from a dataset on the Hub")
    write_text_file(target, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))
    return len(entries)


def _hub_entries(run: Run) -> Iterator[dict[str, Any]]:
    told: set[str] = set()
    for key, (value, _) in run.results.items():
        task, metric, name = key
        rows = run.manifest.datasets.get(task) or read_part(Dataset, None)
        if task in told or not math.isfinite(value) or not _on_hub(rows.dataset):
            continue
        told.add(task)
        dataset = {"id": rows.dataset, "task_id": rows.name or ONLY_TASK, **_given(revision=rows.revision)}
        notes = f"{metric}, {name}; {_few_shot(run, task)}; {rows.rows} rows; numerics {run.identity.get('numerics')}"
        yield {"dataset": dataset, "value": value, **_given(date=_day(run)), "evaluation_framework": "evalengine",
               "notes": f"{notes}; digest {run.digest}"}  # fmt: skip


def write_every_eval(run: Run, target: Path) -> int:
    """Writes Every Eval Ever's record of a run, a result for each metric and filter; returns how many there are.

    Raises `ConfigError` for another ending than .json and for a baseline; `EvalEngineError` if the disk refuses.
    """
    _check(run, target, (".json",), "--every-eval", "JSON: name a file that ends in .json")
    started = parsed(run.manifest.started)
    seconds = f"{started.timestamp():.0f}" if started is not None else "0"
    model = run.manifest.model
    on_hub = model.source if isinstance(model.source, str) and HUB_ID.fullmatch(model.source) else None
    results = [_result(run, key) for key, (value, _) in run.results.items() if math.isfinite(value)]
    if not results:
        raise ConfigError(f"report: --every-eval: {run.source} holds no finite results")
    name = "+".join(dict.fromkeys(key[0] for key in run.results))
    about = {"deployment_type": "self_deployed", "model_availability": "unknown" if on_hub is None else "open_weights",
             "numerics": run.identity.get("numerics"), "weights_sha256": model.weights_sha256,
             "contract_version": run.identity.get("contract_version"), "digest": run.digest}  # fmt: skip
    record = {
        "schema_version": SCHEMA,
        "evaluation_id": f"{name}/{on_hub or model.name}/{seconds}",
        "evaluation_timestamp": run.manifest.started or "unknown",
        "retrieved_timestamp": seconds,
        "source_metadata": {"source_name": "evalengine", "source_type": "evaluation_run",
                            "source_organization_name": "unknown", "evaluator_relationship": "other",
                            "additional_details": _texts({"run": run.name, "digest": run.digest})},
        "eval_library": {"name": "evalengine", "version": run.manifest.code.version or __version__},
        "model_info": {"name": model.name, "id": on_hub or model.name,
                       "inference_engine": {"name": "evalengine", "version": run.manifest.code.version or __version__},
                       "additional_details": _texts(about)},
        "evaluation_results": results,
    }  # fmt: skip
    write_text_file(target, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return len(results)


def _result(run: Run, key: ScoreKey) -> dict[str, Any]:
    task, metric, name = key
    value, stderr = run.results[key]
    scores, interval = run.scores.get(key, {}), metric_interval(run, key)
    uncertainty: dict[str, Any] = {} if stderr is None else {"standard_error": {"value": stderr}}
    if interval is not None and all(map(math.isfinite, interval)):
        uncertainty["confidence_interval"] = {
            "lower": interval[0],
            "upper": interval[1],
            "confidence_level": CONFIDENCE,
        }
    if scores:
        uncertainty["num_samples"] = len(scores)
    return {
        "evaluation_name": task,
        "source_data": _source(run, task),
        "metric_config": {"evaluation_description": f"{metric}, {name}", "metric_name": metric,
                          "lower_is_better": not run.higher_is_better.get(key, True), **_scale(value, scores)},
        "score_details": {"score": value, "details": _texts({"few_shot": _few_shot(run, task), "filter": name,
                                                              "task_digest": run.task_digests.get(task)}),
                          **({"uncertainty": uncertainty} if uncertainty else {})},
    }  # fmt: skip


def _scale(value: float, scores: Mapping[int, float]) -> dict[str, Any]:
    """The kind of score, and its limits, without which the schema takes it for one with named levels."""
    values = {value, *scores.values()}
    if scores and {*scores.values()} <= {0.0, 1.0}:
        return {"score_type": "binary"}
    most = sys.float_info.max
    low, high = (0, 1) if all(0 <= one <= 1 for one in values) else (0 if min(values) >= 0 else -most, most)
    return {"score_type": "continuous", "min_score": low, "max_score": high}


def _source(run: Run, task: str) -> dict[str, Any]:
    rows = run.manifest.datasets.get(task) or read_part(Dataset, None)
    if not _on_hub(rows.dataset):
        return {"dataset_name": task, "source_type": "other"}
    about = _texts({"revision": rows.revision, "config": rows.name, "sha256": rows.sha256})
    return {"dataset_name": task, "source_type": "hf_dataset", "hf_repo": rows.dataset, "samples_number": rows.rows,
            **_given(hf_split=rows.split), "additional_details": about}  # fmt: skip


def _check(run: Run, target: Path, endings: tuple[str, ...], option: str, how: str) -> None:
    if target.suffix not in endings:
        raise ConfigError(f"report: {option} {target}: is {how}")
    if run.kind != "run":
        raise ConfigError(f"report: {option}: {run.source} is no run of evalengine's own, whose manifest names model "
                          "and rows; give the run's folder")  # fmt: skip


def _few_shot(run: Run, task: str) -> str:
    results = read_results(results_files(run.source)[-1]) if run.source.is_dir() else {}
    return f"{results.get('n-shot', {}).get(task, 'unknown')}-shot"


def _on_hub(path: str | None) -> bool:
    return path is not None and "/" in path and HUB_ID.fullmatch(path) is not None


def _day(run: Run) -> str | None:
    started = parsed(run.manifest.started)
    return None if started is None else started.date().isoformat()


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _texts(values: Mapping[str, Any]) -> Details:
    """What is known, as texts."""
    return {name: str(value) for name, value in values.items() if value is not None}
