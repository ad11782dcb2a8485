"""lm-evaluation-harness's files, read as evidence: `results_<iso>.json` and `samples_<task>_<iso>.jsonl`.

Read in lm_eval 0.4.12: `evaluator.evaluate` (what a sample holds), `loggers/evaluation_tracker.py` (names, the folder
<output_path>/<model>/, responses saved as strings, the task hash), `utils.handle_non_serializable` (scalars of NumPy
become strings). Run folders of ours hold the same files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.report.lm_eval_samples import answer, number, responses
from evalengine.report.runs import Item, Key, Run, ScoreKey

ISO = r"(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)"
AGAIN = "run the evaluation again, or take the folder from where it was copied"
SAMPLE_KEYS = ("doc_id", "filter", "metrics", "resps", "filtered_resps", "doc_hash", "prompt_hash", "target_hash")
MODEL_KEYS = ("model", "model_args", "model_dtype", "model_revision", "model_sha", "gen_kwargs", "limit")
SEED_KEYS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
# Not model_name: that is one of the model's arguments, or a random word where they name no model.
RUN_KEYS = ("system_instruction_sha", "chat_template_sha", "fewshot_as_multiturn", "task_hashes")
TASK_KEYS = ("dataset_path", "dataset_name", "test_split", "validation_split", "fewshot_split", "num_fewshot")
PROMPT_KEYS = ("output_type", "description", "doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter")


def results_files(path: Path) -> list[Path]:
    """The results files of a folder, oldest first; or `path` itself, if it is one (`--output_path x.json` names it
    x_<iso>.json)."""
    if path.is_dir():
        return sorted((f for f in path.glob("*.json") if re.search(rf"_{ISO}\.json$", f.name)), key=_date)
    return [path] if re.search(rf"_{ISO}\.json$", path.name) else []


def load_lm_eval(path: Path) -> Run:
    """The newest run of an lm-eval output folder (or that of a results file): texts, log-likelihoods, scores; no
    digests, since lm-eval records no tokens. Raises `ConfigError` if a file is missing or damaged."""
    results, samples = newest(path)
    kinds = {task: _kind(config) for task, config in results.get("configs", {}).items()}
    items: dict[Key, Item] = {}
    for task, rows in samples.items():
        for row in rows:
            for item in responses(task, row, kinds.get(task)):
                items.setdefault(item.key, item)
    return Run(
        source=path,
        kind="lm-eval",
        name=path.resolve().name if path.is_dir() else path.stem,
        digest=None,
        task_digests={},
        identity=_identity(results),
        manifest={},
        items=dict(sorted(items.items())),
        **_outcome(results, samples, kinds),
    )


def read_outcome(path: Path, kinds: Mapping[str, str]) -> dict[str, Any]:
    """`Run`'s scores, results, higher_is_better, answers and hashes, from the newest results and their samples.

    kinds: task -> kind of request.
    """
    return _outcome(*newest(path), kinds)


def newest(path: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """(results, task -> rows of its samples) of a folder's newest run, or of a results file.

    Raises `ConfigError` for what is missing, damaged or edited.
    """
    found = results_files(path)
    if not found:
        raise ConfigError(f"{path}: results_*.json is missing; {AGAIN}")
    file = found[-1]
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: damaged ({error}); {AGAIN}") from error
    if not isinstance(results, dict) or not isinstance(results.get("results"), dict):
        raise ConfigError(f"{file}: no results of lm-eval (it has no `results`); {AGAIN}")
    hashes = results.get("task_hashes") or {}
    samples = {task: list(_rows(name, hashes.get(task))) for task, name in _samples_of(file).items()}
    missing = sorted({*hashes, *results.get("n-samples", {})} - {*samples})
    if missing or not samples:
        wanted = f"samples_{missing[0] if missing else '<task>'}_{_date(file)}.jsonl"
        raise ConfigError(f"{file.parent / wanted}: missing; run lm_eval with --log_samples, or copy the file too")
    return results, samples


def _samples_of(results: Path) -> dict[str, Path]:
    """Task -> the samples written with these results: older ones belong to another run."""
    named = ((re.fullmatch(rf"samples_(.+)_{ISO}\.jsonl", file.name), file) for file in results.parent.iterdir())
    return {m[1]: file for m, file in sorted(named, key=lambda pair: pair[1].name) if m and m[2] == _date(results)}


def _rows(file: Path, task_hash: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a samples file. The task hash, where the results hold one, is over the hashes of every row."""
    hasher, seen = hashlib.sha256(), set()
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: damaged ({error}); {AGAIN}") from error
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(f"{file}, line {line_number}", line)
        if (row["doc_id"], row["filter"]) in seen:
            raise ConfigError(f"{file}, line {line_number}: document {row['doc_id']} a second time; {AGAIN}")
        seen.add((row["doc_id"], row["filter"]))
        hasher.update(f"{row['doc_hash']}{row['prompt_hash']}{row['target_hash']}".encode())
        yield row
    if task_hash is not None and hasher.hexdigest() != task_hash:
        raise ConfigError(f"{file}: not the samples of its results (lines are missing or edited); {AGAIN}")


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: damaged or cut short ({error}); {AGAIN}") from error
    missing = [key for key in SAMPLE_KEYS if not isinstance(row, dict) or key not in row]
    if missing:
        raise ConfigError(f"{where}: no sample of lm-eval 0.4.12 or newer ({', '.join(missing)} missing)")
    if not isinstance(row["doc_id"], int) or not isinstance(row["resps"], list) or not isinstance(row["metrics"], list):
        raise ConfigError(f"{where}: doc_id, resps or metrics is of a wrong type: it was edited; {AGAIN}")
    return dict(row)


def _outcome(
    results: Mapping[str, Any], samples: Mapping[str, list[dict[str, Any]]], kinds: Mapping[str, str | None]
) -> dict[str, Any]:
    scores: dict[ScoreKey, dict[int, float]] = defaultdict(dict)
    answers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    hashes: dict[str, dict[int, tuple[str, str, str]]] = defaultdict(dict)
    for task, rows in samples.items():
        for row in rows:
            doc, name = row["doc_id"], row["filter"]
            hashes[task][doc] = (row["doc_hash"], row["prompt_hash"], row["target_hash"])
            for metric in row["metrics"]:
                if (value := number(row.get(metric))) is not None:
                    scores[task, metric, name][doc] = value
            if (text := answer(row, kinds.get(task))) is not None:
                answers[task, name][doc] = text
    aggregated = dict(_aggregated(results))
    better = results.get("higher_is_better", {})
    directions = {key: (better.get(key[0]) or {}).get(key[1]) for key in {*scores, *aggregated}}
    return {
        "scores": dict(scores),
        "results": aggregated,
        "higher_is_better": {key: value for key, value in sorted(directions.items()) if isinstance(value, bool)},
        "answers": dict(answers),
        "hashes": dict(hashes),
    }


def _aggregated(results: Mapping[str, Any]) -> Iterator[tuple[ScoreKey, tuple[float, float | None]]]:
    for task, values in results["results"].items():
        for key, raw in values.items():
            metric, comma, name = key.partition(",")
            if comma and not metric.endswith("_stderr") and (value := number(raw)) is not None:
                yield (task, metric, name), (value, number(values.get(f"{metric}_stderr,{name}")))


def _kind(config: Mapping[str, Any]) -> str | None:
    """A task's kind of request; lm-eval's multiple-choice tasks ask for log-likelihoods."""
    output_type = config.get("output_type")
    return "loglikelihood" if output_type == "multiple_choice" else output_type


def _identity(results: Mapping[str, Any]) -> dict[str, Any]:
    """What lm-eval's results say about model, seeds, tasks and prompts."""
    config = results.get("config", {})
    tasks = {
        task: {
            "version": results.get("versions", {}).get(task),
            **{key: settings.get(key) for key in (*TASK_KEYS, *PROMPT_KEYS, "generation_kwargs") if key in settings},
        }
        for task, settings in sorted(results.get("configs", {}).items())
    }
    said = {key: config.get(key) for key in (*MODEL_KEYS, *SEED_KEYS)}
    return {**said, **{key: results.get(key) for key in RUN_KEYS}, "tasks": tasks}


def _date(file: Path) -> str:
    match = re.search(rf"_{ISO}\.json$", file.name)
    assert match is not None, file
    return match[1]
