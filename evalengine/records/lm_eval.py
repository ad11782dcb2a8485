"""`results_<iso>.json` and `samples_<task>_<iso>.jsonl`, in lm-evaluation-harness's schema and keys.

As in lm_eval 0.4.12 and 0.4.13: `evaluator.evaluate` (what a sample holds), `loggers/evaluation_tracker.py` (what is
saved, and how responses become strings), `result_schema.py` (the names). Tools that read its files read these. Two
things are more than lm-eval's: a generated sample's `arguments` hold every setting that was in force (lm-eval's those
that the task names), and groups of groups have `n-shot` and `higher_is_better` (lm-eval reads them before their
members').
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config, GroupConfig, leaves
from evalengine.records.folder import RunFolder
from evalengine.records.lm_eval_file import THINKING_TRUNCATED
from evalengine.records.manifest import code_version
from evalengine.version import __version__

NOT_AVAILABLE = "N/A"
Value = float | int | str  # a metric's value; a standard error may be "N/A"


@dataclass(frozen=True)
class Sample:
    """One document under one filter, its fields in the order of a line of the file."""

    doc_id: int
    doc: Mapping[str, Any]
    target: Any
    arguments: Sequence[tuple[Any, ...]]  # per request: (context, continuation or generation settings)
    resps: Sequence[Sequence[Any]]  # per request and repeat: text, or (log-likelihood, is_greedy)
    filtered_resps: Sequence[Any]  # per request, after the filter
    filter: str
    metrics: Mapping[str, Any]  # metric -> this document's value
    doc_hash: str
    prompt_hash: str
    target_hash: str
    doc_cluster: str | None = None  # what the document shares with related ones; None: unrelated
    thinking: Sequence[str] | None = None  # before each response; None where no end of thinking is named
    thinking_truncated: int | None = None  # how many responses reached the length limit while they thought
    outcomes: Sequence[str] | None = None  # how the program in each response ended; None where none was run
    length_limited: int | None = None  # responses that a length limit ended; None where records say it
    unanswered: Mapping[str, int] = field(default_factory=dict)  # one of `UNANSWERED` -> responses of that kind
    judge: Mapping[str, Any] | None = None  # a judge's prompts and the items of its run; None under other filters


@dataclass(frozen=True)
class TaskResult:
    """One task's outcome, or what several tasks give together."""

    name: str
    version: float | str
    num_fewshot: int | None  # None where a group's tasks differ
    metrics: Mapping[str, Value]  # "metric,filter" and "metric_stderr,filter"
    higher_is_better: Mapping[str, bool | None]  # None where a group's tasks contradict each other
    config: Mapping[str, Any]
    original: int  # documents in the split
    effective: int  # documents evaluated
    task_hash: str
    samples: Sequence[Sample] = ()
    thinking_truncated: int | None = None  # how many responses, as in `Sample`
    unanswered: Mapping[str, int] = field(default_factory=dict)  # `REJECTED` -> documents, `UNANSWERED` -> responses
    alias: str | None = None  # None: the name
    children: Sequence[str] = ()  # a group's tasks and groups
    counts: Mapping[str, int] = field(default_factory=dict)  # a group's "metric,filter" -> documents of tasks with it

    @property
    def scores(self) -> dict[tuple[str, str], dict[int, float]]:
        """(metric, filter) -> document -> its value; metrics that are no numbers are left out."""
        scores: dict[tuple[str, str], dict[int, float]] = {}
        for sample in self.samples:
            for metric, value in sample.metrics.items():
                if isinstance(value, int | float):
                    scores.setdefault((metric, sample.filter), {})[sample.doc_id] = float(value)
        return scores


@dataclass(frozen=True)
class ModelInfo:
    """The model as lm-eval describes it."""

    name: str
    path: str
    dtype: str
    revision: str | None
    sha: str | None
    num_parameters: int
    max_length: int
    device: str
    tokenizer: Any = None  # what its special tokens are read from
    chat_template: str | None = None  # only if it was applied
    program: str = "evalengine"  # the program that ran the model
    arguments: Mapping[str, Any] | None = None  # lm-eval's `model_args`; None: the path and the run's numerics


def group_results(groups: Mapping[str, GroupConfig], tasks: Sequence[TaskResult]) -> list[TaskResult]:
    """One result for each group that has all its tasks, in the groups' order; groups within groups count by their
    tasks.

    As in lm-eval 0.4.13 (`api/group.py`), a group's mean is over documents (`weight_by_size`) or over tasks. Its
    standard error is pooled from the tasks' errors, or that of a mean of independent means. Sums are `math.fsum`, as
    in `harness.metrics`.
    """
    by_name = {task.name: task for task in tasks}
    results = []
    for name, group in groups.items():
        if not by_name.keys() >= {*leaves(name, groups)}:
            continue
        members = [by_name[leaf] for leaf in leaves(name, groups)]
        metrics: dict[str, Value] = {}
        for entry in group.aggregate_metric_list or []:
            metrics.update(_aggregated(entry, members))
        better: dict[str, bool | None] = {}
        for task in members:
            for metric, value in task.higher_is_better.items():
                better[metric] = value if better.get(metric, value) == value else None
        shots = {task.num_fewshot for task in members}
        keys = [key for key in metrics if not key.partition(",")[0].endswith("_stderr")]
        result = TaskResult(
            name=name,
            version=NOT_AVAILABLE if group.version is None else str(group.version),
            num_fewshot=shots.pop() if len(shots) == 1 else None,
            metrics=metrics,
            higher_is_better=better,
            config={},
            original=sum(task.original for task in members),
            effective=sum(task.effective for task in members),
            task_hash="",
            alias=group.alias,
            children=tuple(group.tasks),
            counts={key: sum(task.effective for task in members if key in task.metrics) for key in keys},
        )
        results.append(result)
    return results


def _aggregated(entry: Mapping[str, Any], tasks: Sequence[TaskResult]) -> Iterator[tuple[str, Value]]:
    """The metric and its standard error, under the filters that the entry names, or all that the tasks have for it;
    nothing where no task has it."""
    metric, filters = entry["metric"], entry.get("filter_list")
    if filters is None:
        keys = (key.partition(",") for task in tasks for key in task.metrics)
        filters = sorted({filter_name for name, _, filter_name in keys if name == metric})
    for filter_name in [filters] if isinstance(filters, str) else filters:
        key, error_key = f"{metric},{filter_name}", f"{metric}_stderr,{filter_name}"
        having = [task for task in tasks if key in task.metrics]
        if not having:
            continue
        sizes = [task.effective for task in having]
        weights = sizes if entry.get("weight_by_size", True) else [1] * len(sizes)
        values = [float(task.metrics[key]) for task in having]
        yield key, math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        errors = [error for task in having if isinstance(error := task.metrics[error_key], float)]
        if len(errors) < len(having):
            yield error_key, NOT_AVAILABLE
        elif weights is sizes:  # at least one task has two documents
            squares = math.fsum((size - 1) * size * error**2 for error, size in zip(errors, sizes, strict=True))
            yield error_key, math.sqrt(squares / (sum(sizes) - len(sizes)) / sum(sizes))
        else:
            yield error_key, math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)


def results_dict(
    tasks: Sequence[TaskResult],
    model: ModelInfo,
    config: Config,
    started: float = 0.0,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """The content of `results_<iso>.json`. config: the run's. started: UNIX seconds. seconds: what the run took."""
    groups = group_results(config.groups, tasks)
    by_name = sorted(tasks, key=lambda task: task.name)
    both = sorted([*tasks, *groups], key=lambda entry: entry.name)

    def special(name: str) -> list[Any]:
        return [getattr(model.tokenizer, name, None), str(getattr(model.tokenizer, f"{name}_id", None))]

    arguments: dict[str, Any] = {
        "pretrained": model.path,
        "numerics": config.numerics,
        "batch_invariant": config.batch_invariant,
    }
    if config.model.adapter is not None:
        arguments["peft"] = config.model.adapter
    return {
        "results": {entry.name: _result(entry) for entry in (*tasks, *groups)},
        **({"groups": {group.name: _result(group) for group in groups if group.metrics}} if groups else {}),
        "group_subtasks": {group.name: list(group.children) for group in groups},
        "configs": {task.name: dict(task.config) for task in by_name},
        "versions": {entry.name: entry.version for entry in both},
        "n-shot": {entry.name: entry.num_fewshot for entry in both if entry.num_fewshot is not None},
        "higher_is_better": {entry.name: dict(entry.higher_is_better) for entry in both},
        "n-samples": {task.name: {"original": task.original, "effective": task.effective} for task in tasks},
        "config": {
            "model": model.program,
            "model_args": model.arguments or arguments,
            "model_num_parameters": model.num_parameters,
            "model_dtype": model.dtype,
            "model_revision": model.revision,
            "model_sha": model.sha,
            "batch_size": None,  # the scheduler chooses it at every step
            "batch_sizes": [],
            "device": model.device,
            "use_cache": None,
            "limit": config.limit,
            "bootstrap_iters": 100000,
            "gen_kwargs": None,
            "random_seed": config.seed,
            "numpy_seed": config.seed,
            "torch_seed": config.seed,
            "fewshot_seed": config.fewshot_seed,
        },
        "git_hash": code_version().commit,
        "date": started,
        "transformers_version": metadata.version("transformers"),
        "evalengine_version": __version__,
        **{f"tokenizer_{name}": special(name) for name in ("pad_token", "eos_token", "bos_token")},
        "eot_token_id": getattr(model.tokenizer, "eos_token_id", None),
        "max_length": model.max_length,
        "task_hashes": {task.name: task.task_hash for task in tasks},
        "model_source": "evalengine",
        "model_name": model.name,
        "model_name_sanitized": re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model.name),
        "system_instruction": config.system_instruction,
        "system_instruction_sha": _sha(config.system_instruction),
        "fewshot_as_multiturn": config.fewshot_as_multiturn if config.apply_chat_template else None,
        "chat_template": model.chat_template,
        "chat_template_sha": _sha(model.chat_template),
        "total_evaluation_time_seconds": str(seconds),
    }


def _result(task: TaskResult) -> dict[str, Any]:
    result = {"name": task.name, "alias": task.alias or task.name, "sample_len": task.effective, **task.metrics}
    thinking = {} if task.thinking_truncated is None else {THINKING_TRUNCATED: task.thinking_truncated}
    counts = {"sample_count": dict(task.counts)} if task.counts else {}
    return {**result, **thinking, **task.unanswered, **counts}


def sample_row(sample: Sample) -> dict[str, Any]:
    """One line of `samples_<task>_<iso>.jsonl`."""
    row = {name: value for name, value in vars(sample).items() if name not in _OPTIONAL or value not in (None, {})}
    requests = enumerate(sample.arguments)
    return row | {
        "doc": dict(sample.doc),
        "target": str(sample.target),
        "arguments": {f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(own)} for i, own in requests},
        "resps": _strings(sample.resps),
        "filtered_resps": _strings(sample.filtered_resps),
        "metrics": list(sample.metrics),
        **sample.metrics,
    }


_OPTIONAL = ("doc_cluster", "thinking", "thinking_truncated", "outcomes", "length_limited", "unanswered", "judge")


def remove_results(folder: RunFolder) -> None:
    """Removes results and samples of an earlier attempt at this run."""
    for stale in [*folder.path.glob("results_*.json"), *folder.path.glob("samples_*.jsonl")]:
        stale.unlink()


def write_samples(folder: RunFolder, task: TaskResult, finished: datetime) -> Path:
    """Writes the samples of one task and returns their file. Raises `EvalEngineError` if the disk refuses."""
    lines = [json.dumps(sample_row(sample), ensure_ascii=False, default=_plain) for sample in task.samples]
    return folder.write_text(f"samples_{task.name}_{_iso(finished)}.jsonl", "".join(line + "\n" for line in lines))


def write_results(
    folder: RunFolder, tasks: Sequence[TaskResult], content: Mapping[str, Any], finished: datetime
) -> Path:
    """Writes the samples that the tasks have, then `results_dict` with the same time in their names. Raises as
    `write_samples`."""
    for task in tasks:
        if task.samples:
            write_samples(folder, task, finished)
    results = json.dumps(content, indent=2, ensure_ascii=False, default=_plain)
    return folder.write_text(f"results_{_iso(finished)}.json", results)


def _iso(finished: datetime) -> str:
    return finished.isoformat().replace(":", "-")


def _sha(text: str | None) -> str | None:
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def _strings(value: Any) -> Any:
    """Every value as a string, in the same nested lists."""
    return [_strings(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def _plain(value: Any) -> Any:
    """A value that json cannot write: numpy's values and sets as Python's own, anything else as a string."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
