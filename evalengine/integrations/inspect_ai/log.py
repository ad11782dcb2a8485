"""A log of inspect_ai, read as a run: its samples are documents, its epochs are repeats, its scorers are metrics.

Both of its forms are read, without inspect_ai: `.json`, and `.eval`, a zip file of one JSON a sample. A log holds texts
and scores and no tokens, so that such a run compares as one of lm-eval's does: by answers and by scores.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.lm_eval_file import LENGTH_LIMITED
from evalengine.records.shapes import Count, Sha256, Text, fits, with_fields, wrong
from evalengine.report.numbers import exact_sum, mean
from evalengine.report.read.lm_eval import of_lm_eval
from evalengine.report.read.run import RunData
from evalengine.util.plain_files import parse_json, read_json

SUFFIX = ".eval"
HEADER, SAMPLES = "header.json", "samples/"
AGAIN = "take the file from where it was copied"
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # inspect_ai's `value_to_float`
_EVAL = with_fields({"task": Text, "model": Text, "packages?": dict, "dataset?": dict, "model_generate_config?": dict,
                     "model_args?": dict})  # fmt: skip
_SHAPE = with_fields({"eval": _EVAL, "samples": list[dict]})
_SAMPLE = with_fields({"id": Text | Count, "epoch": Count, "output": dict, "scores?": dict, "metadata?": dict})
# The columns of a row that are not metrics; a scorer of such a name is called `name (score)`.
ROW = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash",
       "prompt_hash", "target_hash", "doc_cluster", "thinking", "thinking_truncated", "outcomes",
       LENGTH_LIMITED)  # fmt: skip
LIMITS = ("max_tokens", "model_length")  # inspect_ai's reasons for the end of an answer that a limit cut
MAX_BYTES = 1 << 32  # of all JSON in an `.eval` file


def load_inspect_log(path: Path) -> RunData:
    """The run that a log tells of. Raises ConfigError for a file that is damaged, or an evaluation that did not end."""
    log = _read(path)
    if problem := wrong(log, _SHAPE):
        raise ConfigError(f"{path}: no log of inspect_ai ({problem}); {AGAIN}")
    if log.get("status") != "success":
        raise ConfigError(
            f"{path}: its evaluation did not end ({str(log.get('status'))[:20]}); run `inspect eval-retry`"
        )
    task = log["eval"]["task"].replace("/", "_")
    ours = "evalengine" in (log["eval"].get("packages") or {})  # which inspect_ai itself does not name
    rows = _rows(path, log["samples"], ours)
    results = _results(task, log["eval"], rows)
    samples = {task: rows}
    return RunData(of_lm_eval(path, results, samples), results, samples)


def _read(path: Path) -> Any:
    try:
        if path.suffix != SUFFIX:
            return read_json(path)
        with suppress(ImportError):
            import_module("zipfile_zstd")  # what inspect_ai installs for its newer logs
        with zipfile.ZipFile(path) as file:
            if sum(entry.file_size for entry in file.infolist()) > MAX_BYTES:
                raise ValueError("it unpacks to more than 4 GiB")
            names = [name for name in file.namelist() if name.startswith(SAMPLES) and name.endswith(".json")]
            header = parse_json(file.read(HEADER))
            return {**header, "samples": [parse_json(file.read(name)) for name in names]}
    except NotImplementedError as error:
        fix = "pip install zipfile-zstd, or write it as JSON: inspect log convert --to json"
        raise ConfigError(f"{path}: it is compressed by zstd, which Python reads from 3.14 on; {fix}") from error
    except RuntimeError as error:  # what `zipfile` raises for an entry that needs a password
        raise ConfigError(f"{path}: it cannot be unpacked ({error}); save the log without encryption") from error
    except Exception as error:  # each unpacker has its own errors: zlib's, lzma's, zstandard's
        raise ConfigError(f"{path}: damaged, or no log of inspect_ai ({error}); {AGAIN}") from error


def _rows(path: Path, samples: Sequence[Mapping[str, Any]], ours: bool) -> list[dict[str, Any]]:
    """Rows of lm-eval's samples for each sample, whose epochs are its repeats. Samples are numbered in their ids'
    order, numbers before texts, so that two logs of one task number them alike."""
    by_id: dict[Any, dict[int, Mapping[str, Any]]] = {}
    for sample in samples:
        if problem := wrong(sample, _SAMPLE):
            raise ConfigError(f"{path}: a sample that is none ({problem}); {AGAIN}")
        epochs = by_id.setdefault(sample["id"], {})
        if sample["epoch"] in epochs:
            raise ConfigError(f"{path}: sample {sample['id']} has epoch {sample['epoch']} twice; {AGAIN}")
        epochs[sample["epoch"]] = sample
    ids = sorted(by_id, key=lambda one: (isinstance(one, str), one))
    grouped = ([by_id[one][epoch] for epoch in sorted(by_id[one])] for one in ids)
    return [row for number, epochs in enumerate(grouped) for row in _of_document(number, epochs, ours)]


def _of_document(number: int, epochs: Sequence[Mapping[str, Any]], ours: bool) -> Iterator[dict[str, Any]]:
    """A document's row; a row for each filter where the log is of a run of ours, whose scorers are called `metric
    (filter)`, with the hashes that it had."""
    first = epochs[0]
    doc = {name: first[name] for name in ("id", "input", "choices", "target") if first.get(name) is not None}
    prompt, target = _json(first.get("input")), _json(first.get("target"))
    hashes = {"doc_hash": _sha256(_json(doc)), "prompt_hash": _sha256(prompt), "target_hash": _sha256(target)}
    if ours and (recorded := first.get("metadata")):
        hashes = {name: recorded[name] if fits(recorded.get(name), Sha256) else value for name, value in hashes.items()}
    values: dict[str, list[float]] = {}
    for sample in epochs:
        for scorer, score in (sample.get("scores") or {}).items():
            if isinstance(score, dict) and (value := _number(score.get("value"))) is not None:
                values.setdefault(scorer, []).append(value)
    filters: dict[str, dict[str, str]] = {}  # filter -> metric -> scorer
    for scorer in [name for name, own in values.items() if len(own) == len(epochs)]:
        found = re.fullmatch(r"(.+) \((.+)\)", scorer) if ours else None
        metric, of = found.groups() if found else (scorer, "none")
        filters.setdefault(of, {})[f"{metric} (score)" if metric in ROW else metric] = scorer
    for of, scorers in (filters or {"none": {}}).items():
        yield {
            "doc_id": number,
            "doc": doc,
            "target": target,
            "arguments": {"gen_args_0": {"arg_0": prompt}},
            "resps": [[_completion(sample) for sample in epochs]],
            "filtered_resps": [_answer(first, [*scorers.values()])],
            "filter": of,
            "metrics": list(scorers),
            **hashes,
            LENGTH_LIMITED: sum(_choice(sample).get("stop_reason") in LIMITS for sample in epochs),
            **{metric: mean(values[scorer]) for metric, scorer in scorers.items()},
        }


def _results(task: str, spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """lm-eval's results of the rows: each metric's mean, and its standard error over the documents."""
    names = list(dict.fromkeys((name, row["filter"]) for row in rows for name in row["metrics"]))
    documents = len({row["doc_id"] for row in rows})
    values: dict[str, Any] = {"alias": task, "name": task, "sample_len": documents}
    for name, of in names:
        own = [row[name] for row in rows if name in row["metrics"] and row["filter"] == of]
        values[f"{name},{of}"] = whole = mean(own)
        spread = exact_sum((value - whole) * (value - whole) for value in own)
        values[f"{name}_stderr,{of}"] = math.sqrt(spread / (len(own) - 1) / len(own)) if len(own) > 1 else "N/A"
    generation = spec.get("model_generate_config") or {}
    return {
        "results": {task: values},
        "group_subtasks": {},
        "configs": {task: {"task": task, "output_type": "generate_until", "dataset_path": _named(spec)}},
        "versions": {task: _version(spec.get("task_version"))},
        "n-shot": {task: 0},
        "higher_is_better": {task: dict.fromkeys((name for name, _ in names), True)},
        "n-samples": {task: {"original": documents, "effective": documents}},
        "config": {"model": spec["model"], "model_args": {**(spec.get("model_args") or {}), "model": spec["model"]},
                   "gen_kwargs": generation,
                   "random_seed": generation.get("seed"), "limit": None},
        "task_hashes": {},
        "harness": "inspect_ai",
    }  # fmt: skip


def _version(value: Any) -> Any:
    """A task's version; of a run of ours a number, which the log has as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _named(spec: Mapping[str, Any]) -> str | None:
    dataset = spec.get("dataset")
    return dataset.get("name") if isinstance(dataset, dict) else None


def _completion(sample: Mapping[str, Any]) -> str:
    """The text of the model's answer, without what it thought."""
    message = _choice(sample).get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict) and part.get("text"))
    return content if isinstance(content, str) else ""


def _choice(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of the model's answers."""
    choices = sample["output"].get("choices")
    return choices[0] if fits(choices, list[dict]) and choices else {}


def _answer(sample: Mapping[str, Any], scorers: Sequence[str]) -> str:
    """The extracted answer: that of the first of the scorers that names one, else any other's, else the whole text."""
    scores = sample.get("scores") or {}
    order = [*scorers, *(name for name in scores if name not in scorers)]
    answers = [scores[name].get("answer") for name in order if isinstance(scores.get(name), dict)]
    return next((answer for answer in answers if isinstance(answer, str)), _completion(sample))


def _number(value: Any) -> float | None:
    """A score as a number; None for one that is none."""
    if isinstance(value, str):
        return GRADES.get(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
