"""A run as logs of inspect_ai, a file a task, which its viewer and its data frames read (`inspect view`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evalengine.records.folder import TextFile, sanitise
from evalengine.report.leaderboard.models import labels
from evalengine.report.numbers import counted
from evalengine.report.read.run import Key, RunData
from evalengine.version import __version__

VERSION = 2  # of inspect_ai's log
HASHES = ("doc_hash", "prompt_hash", "target_hash")  # of a sample, in its metadata


def inspect_logs(data: RunData, target: Path) -> list[TextFile]:
    """The log of a run's task; for each of several tasks a file `TARGET-TASK.json`."""
    files = []
    for task in data.tasks:
        samples = list(_samples(data, task))
        file = target if len(data.tasks) == 1 else target.with_name(f"{target.stem}-{sanitise(task)}.json")
        text = json.dumps(_log(data, task, samples), ensure_ascii=False, indent=1, default=str) + "\n"
        files.append(TextFile(file, text, counted(len(samples), "sample")))
    return files


def _log(data: RunData, task: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    run, config = data.run, data.results["configs"].get(task) or {}
    started = run.manifest.content.get("started") or "1970-01-01T00:00:00Z"
    model = f"evalengine/{run.manifest.model.name}" if run.kind == "run" else labels([run])[0]
    spec = {
        "created": started.replace("Z", "+00:00"),
        "eval_id": (run.task_digests.get(task) or task)[:22],
        "run_id": (run.digest or run.name)[:22],
        "task_id": (run.task_digests.get(task) or task)[:22],
        "task": task,
        "task_version": str(data.results["versions"].get(task)),
        "dataset": {"name": config.get("dataset_path") if isinstance(config.get("dataset_path"), str) else task,
                    "samples": len({one["id"] for one in samples}),
                    "sample_ids": list(dict.fromkeys(one["id"] for one in samples))},
        "model": model,
        "config": {"epochs": max((one["epoch"] for one in samples), default=1)},
        "packages": {"evalengine": __version__},
        "metadata": {"digest": run.digest, "task_digest": run.task_digests.get(task), "run": run.name,
                     "numerics": run.identity.get("numerics")},
    }  # fmt: skip
    return {
        "version": VERSION,
        "status": "success",
        "eval": spec,
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {"total_samples": len(samples), "completed_samples": len(samples), "scores": _scores(data, task)},
        "stats": {"started_at": spec["created"], "completed_at": spec["created"], "model_usage": {}},
        "samples": samples,
    }


def _scores(data: RunData, task: str) -> list[dict[str, Any]]:
    """Each metric of each filter as a scorer, with its mean and standard error."""
    scores = []
    for (of, metric, name), (value, stderr) in data.run.results.items():
        if of == task and math.isfinite(value):
            errors = {} if stderr is None else {"stderr": {"name": "stderr", "value": stderr}}
            metrics = {"mean": {"name": "mean", "value": value}, **errors}
            scores.append({"name": _named(metric, name), "scorer": _named(metric, name), "metrics": metrics})
    return scores


def _samples(data: RunData, task: str) -> Iterator[dict[str, Any]]:
    """A sample for each document and repeat."""
    for document, rows in data.samples[task].items():
        first = rows[0]
        prompt, choices = questions_of(first)
        several = {"choices": choices} if choices else {}
        scores = {_named(metric, row["filter"]): _score(data, task, document, row, metric)
                  for row in rows for metric in row["metrics"]}  # fmt: skip
        for epoch, (text, reason) in enumerate(said_of(data, task, document, first), 1):
            name, thinking = f"{task}-{document}-{epoch}", (first.get("thinking") or [])[epoch - 1 : epoch]
            content = [{"type": "reasoning", "reasoning": part} for part in thinking if part]
            question = {"id": f"{name}-asked", "role": "user", "content": prompt}
            said = {"id": f"{name}-said", "role": "assistant", "source": "generate",
                    "content": [*content, {"type": "text", "text": text}] if content else text}  # fmt: skip
            usage = _usage(data, (task, document, 0, epoch - 1))
            output = {"model": data.run.name, "completion": text, **({"usage": usage} if usage else {}),
                      "choices": [{"message": said, "stop_reason": reason}]}  # fmt: skip
            yield {"id": document, "epoch": epoch, "input": prompt, "target": str(first["target"]), **several,
                   "messages": [question, said], "output": output,
                   "model_usage": {data.run.name: usage} if usage else {},
                   "scores": {name: score for name, score in scores.items() if score is not None},
                   "metadata": {name: first[name] for name in HASHES}}  # fmt: skip


def _usage(data: RunData, key: Key) -> dict[str, Any]:
    """The tokens of a generation, where the run holds them."""
    item, ending = data.run.items.get(key), data.endings.get(key)
    if item is None or item.output_ids is None or ending is None or item.kind != "generate_until":
        return {}
    said, thought = len(item.output_ids), data.thinking.get(key)
    usage = {"input_tokens": ending[1], "output_tokens": said, "total_tokens": ending[1] + said}
    return usage if thought is None else {**usage, "reasoning_tokens": thought[0]}


def questions_of(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(a sample's prompt, the choices if there are several)."""
    arguments = [*row["arguments"].values()]
    prompt = str(arguments[0].get("arg_0", "")) if arguments else ""
    return prompt, [] if len(arguments) < 2 else [str(one.get("arg_1", "")) for one in arguments]


def said_of(data: RunData, task: str, document: int, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(text, inspect_ai's reason for its end) of each of a sample's repeats."""
    repeats = row["resps"][0] if row["resps"] else [""]
    return [_answered(data, task, document, repeat, response) for repeat, response in enumerate(repeats)]


def _answered(data: RunData, task: str, document: int, repeat: int, response: Any) -> tuple[str, str]:
    """(the answer's text, inspect_ai's reason for its end). Of given choices the answer is the one that was taken."""
    key = (task, document, 0, repeat)
    if data.kinds.get(task) not in (None, "generate_until"):
        taken = [answers.get(document) for (of, _), answers in data.run.answers.items() if of == task]
        return str(next((one for one in taken if one is not None), response)), "stop"
    reason = data.endings.get(key, ("stop", 0))[0]
    return str(response), "max_tokens" if reason == "length" else "stop"


def _score(data: RunData, task: str, document: int, row: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    value = data.run.scores.get((task, metric, row["filter"]), {}).get(document)
    if value is None:
        return None
    return {"value": value, "answer": data.run.answers.get((task, row["filter"]), {}).get(document)}


def _named(metric: str, name: str) -> str:
    return metric if name == "none" else f"{metric} ({name})"
