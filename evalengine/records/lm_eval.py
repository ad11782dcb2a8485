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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evalengine.config.schema import Config
from evalengine.records.folder import RunFolder
from evalengine.records.lm_eval_file import THINKING_TRUNCATED
from evalengine.records.manifest import code_version
from evalengine.version import __version__

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
    """One task's outcome."""

    name: str
    version: float | str
    num_fewshot: int
    metrics: Mapping[str, Value]  # "metric,filter" and "metric_stderr,filter"
    higher_is_better: Mapping[str, bool]
    config: Mapping[str, Any]
    original: int  # documents in the split
    effective: int  # documents evaluated
    task_hash: str
    samples: Sequence[Sample] = ()
    thinking_truncated: int | None = None  # how many responses, as in `Sample`
    unanswered: Mapping[str, int] = field(default_factory=dict)  # `REJECTED` -> documents, `UNANSWERED` -> responses
    alias: str | None = None  # None: the name


@dataclass(frozen=True)
class GroupResult:
    """What several tasks give together."""

    name: str
    alias: str
    version: str
    children: Sequence[str]  # tasks and groups
    metrics: Mapping[str, Value]  # as in `TaskResult`
    counts: Mapping[str, int]  # "metric,filter" -> documents of the tasks that have it
    higher_is_better: Mapping[str, bool | None]  # None where its tasks contradict each other
    effective: int  # documents of all its tasks
    num_fewshot: int | None  # None where they differ


@dataclass(frozen=True)
class ModelInfo:
    """The model as lm-eval describes it. Special tokens are (token, id), both null if there is none."""

    name: str
    path: str
    dtype: str
    revision: str | None
    sha: str | None
    num_parameters: int
    max_length: int
    device: str
    eot_token_id: int | None
    pad_token: tuple[str | None, int | None] = (None, None)
    eos_token: tuple[str | None, int | None] = (None, None)
    bos_token: tuple[str | None, int | None] = (None, None)
    chat_template: str | None = None  # only if it was applied
    program: str = "evalengine"  # what asked the model
    arguments: Mapping[str, Any] | None = None  # lm-eval's `model_args`; None: the path and the run's numerics


def results_dict(
    tasks: Sequence[TaskResult],
    model: ModelInfo,
    config: Config,
    started: float = 0.0,
    seconds: float = 0.0,
    groups: Sequence[GroupResult] = (),
) -> dict[str, Any]:
    """The content of `results_<iso>.json`. config: the run's. started: UNIX seconds. seconds: what the run took."""
    by_name = sorted(tasks, key=lambda task: task.name)
    either: list[TaskResult | GroupResult] = [*tasks, *groups]
    both = sorted(either, key=lambda entry: entry.name)
    grouped = {group.name: _group(group) for group in groups}
    return {
        "results": {**{task.name: _result(task) for task in tasks}, **grouped},
        **({"groups": {group.name: grouped[group.name] for group in groups if group.metrics}} if groups else {}),
        "group_subtasks": {group.name: list(group.children) for group in groups},
        "configs": {task.name: dict(task.config) for task in by_name},
        "versions": {entry.name: entry.version for entry in both},
        "n-shot": {entry.name: entry.num_fewshot for entry in both if entry.num_fewshot is not None},
        "higher_is_better": {entry.name: dict(entry.higher_is_better) for entry in both},
        "n-samples": {task.name: {"original": task.original, "effective": task.effective} for task in tasks},
        "config": _execution(model, config),
        "git_hash": code_version().commit,
        "date": started,
        "transformers_version": metadata.version("transformers"),
        "evalengine_version": __version__,
        "tokenizer_pad_token": _token(model.pad_token),
        "tokenizer_eos_token": _token(model.eos_token),
        "tokenizer_bos_token": _token(model.bos_token),
        "eot_token_id": model.eot_token_id,
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


def _group(group: GroupResult) -> dict[str, Any]:
    counts = {"sample_count": dict(group.counts)} if group.counts else {}
    return {"name": group.name, "alias": group.alias, "sample_len": group.effective, **group.metrics, **counts}


def _result(task: TaskResult) -> dict[str, Any]:
    result = {"name": task.name, "alias": task.alias or task.name, "sample_len": task.effective, **task.metrics}
    thinking = {} if task.thinking_truncated is None else {THINKING_TRUNCATED: task.thinking_truncated}
    return {**result, **thinking, **task.unanswered}


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
    folder: RunFolder,
    tasks: Sequence[TaskResult],
    model: ModelInfo,
    config: Config,
    finished: datetime,
    *,
    started: float = 0.0,
    seconds: float = 0.0,
    groups: Sequence[GroupResult] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Writes the samples that the tasks have, then the results with the same time in their names.

    config, started, seconds: as in `results_dict`. more: further keys of the results. Raises as `write_samples`.
    """
    for task in tasks:
        if task.samples:
            write_samples(folder, task, finished)
    content = {**results_dict(tasks, model, config, started, seconds, groups), **more}
    results = json.dumps(content, indent=2, ensure_ascii=False, default=_plain)
    return folder.write_text(f"results_{_iso(finished)}.json", results)


def _iso(finished: datetime) -> str:
    return finished.isoformat().replace(":", "-")


def _execution(model: ModelInfo, config: Config) -> dict[str, Any]:
    """lm-eval's `config`: the model and how it was run."""
    arguments: dict[str, Any] = {
        "pretrained": model.path,
        "numerics": config.numerics,
        "batch_invariant": config.batch_invariant,
    }
    if config.model.adapter is not None:
        arguments["peft"] = config.model.adapter
    return {
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
    }


def _token(token: tuple[str | None, int | None]) -> list[Any]:
    return [token[0], str(token[1])]


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
