"""lm-evaluation-harness's files, read as evidence: `results_<iso>.json` and `samples_<task>_<iso>.jsonl`.

As in lm_eval 0.4.13: `evaluator.evaluate` (what a sample holds), `loggers/evaluation_tracker.py` (names, the folder
<output_path>/<model>/, responses saved as strings, the task hash), `utils.handle_non_serializable` (scalars of NumPy
become strings). Run folders of ours hold the same files.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.lm_eval_file import (
    AGAIN,
    LENGTH_LIMITED,
    REJECTED,
    UNANSWERED,
    metrics_of,
    read_results,
    read_samples,
    results_date,
    results_files,
    samples_files,
)
from evalengine.records.manifest_data import Manifest
from evalengine.records.shapes import Count, fits
from evalengine.report.read.groups import groups_of
from evalengine.report.read.lm_eval_samples import (
    ROLLING,
    answer,
    choice_texts,
    choices_of,
    number,
    responses,
    weighted_pair,
)
from evalengine.report.read.run import Item, Key, Run, Samples, ScoreKey

MODEL_KEYS = ("model", "model_args", "model_dtype", "model_revision", "model_sha", "gen_kwargs", "limit")
SEED_KEYS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
# model_name is left out: it is one of the model's arguments, or a random word where they name no model.
RUN_KEYS = ("system_instruction_sha", "chat_template_sha", "fewshot_as_multiturn", "task_hashes")
TASK_KEYS = ("dataset_path", "dataset_name", "test_split", "validation_split", "fewshot_split", "num_fewshot")
PROMPT_KEYS = ("output_type", "description", "doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter")


def of_lm_eval(path: Path, results: Mapping[str, Any], samples: Samples) -> Run:
    """The run that `newest` read from `path`: texts, log-likelihoods, scores; no digests, since lm-eval records no
    tokens. lm-eval's own files name no length limits, rejected documents or unanswered ones."""
    types = {task: config.get("output_type") for task, config in results["configs"].items()}
    kinds = {task: "loglikelihood" if name == "multiple_choice" else name for task, name in types.items()}
    items: dict[Key, Item] = {}
    for task, rows in samples.items():
        for row in rows:
            for item in responses(task, row, kinds.get(task)):
                items.setdefault(item.key, item)
    cut = {task: frozenset(row["doc_id"] for row in rows if row.get(LENGTH_LIMITED)) for task, rows in samples.items()}
    unanswered = {
        task: {name: values[name] for name in (REJECTED, *UNANSWERED) if fits(values.get(name), Count)}
        for task, values in results["results"].items()
    }
    return Run(
        source=path,
        kind="lm-eval",
        name=path.resolve().name if path.is_dir() else path.stem,
        digest=None,
        task_digests={},
        identity=_identity(results),
        manifest=Manifest({}),
        items=dict(sorted(items.items())),
        cut={task: documents for task, documents in cut.items() if documents},
        unanswered={task: counts for task, counts in unanswered.items() if counts},
        **outcome_of(results, samples, kinds),
    )


def newest(path: Path) -> tuple[dict[str, Any], Samples]:
    """(results, rows of each task's samples) of a folder's newest run, or of a results file.

    Raises `ConfigError` for what is missing, damaged or edited.
    """
    files = results_files(path)
    if not files:
        raise ConfigError(f"{path}: results_*.json is missing; {AGAIN}")
    file = files[-1]
    results = read_results(file)
    hashes = results.get("task_hashes") or {}
    samples = {task: list(_rows(name, hashes.get(task))) for task, name in samples_files(file).items()}
    missing = sorted({*hashes, *results["n-samples"]} - {*samples})
    if missing or not samples:
        lacking = f"samples_{missing[0] if missing else '<task>'}_{results_date(file)}.jsonl"
        raise ConfigError(f"{file.parent / lacking}: missing; run lm_eval with --log_samples, or copy the file too")
    return results, samples


def _rows(file: Path, task_hash: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a samples file. The task hash, where the results hold one, is over the hashes of every row."""
    hasher, seen = hashlib.sha256(), set()
    for row in read_samples(file):
        if (row["doc_id"], row["filter"]) in seen:
            raise ConfigError(f"{file}: document {row['doc_id']} a second time; {AGAIN}")
        seen.add((row["doc_id"], row["filter"]))
        hasher.update(f"{row['doc_hash']}{row['prompt_hash']}{row['target_hash']}".encode())
        yield row
    if task_hash is not None and hasher.hexdigest() != task_hash:
        raise ConfigError(f"{file}: not the samples of its results (lines are missing or edited); {AGAIN}")


def outcome_of(results: Mapping[str, Any], samples: Samples, kinds: Mapping[str, str | None]) -> dict[str, Any]:
    """`Run`'s scores, results, answers, hashes and what depends on them, from what `newest` read.

    kinds: each task's kind of request.
    """
    scores: dict[ScoreKey, dict[int, float]] = defaultdict(dict)
    answers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    hashes: dict[str, dict[int, tuple[str, str, str]]] = defaultdict(dict)
    weighted: dict[ScoreKey, dict[int, tuple[float, float]]] = defaultdict(dict)
    clusters: dict[str, dict[int, str]] = defaultdict(dict)
    texts: dict[str, dict[int, tuple[str, ...]]] = {}
    choices: dict[ScoreKey, dict[int, int]] = {}
    for task, rows in samples.items():
        for row in rows:
            doc, name = row["doc_id"], row["filter"]
            hashes[task][doc] = (row["doc_hash"], row["prompt_hash"], row["target_hash"])
            for metric in row["metrics"]:
                if (value := number(row.get(metric))) is not None:
                    scores[task, metric, name][doc] = value
                elif kinds.get(task) == ROLLING and (pair := weighted_pair(row.get(metric))) is not None:
                    weighted[task, metric, name][doc] = pair
            if (text := answer(row, kinds.get(task))) is not None:
                answers[task, name][doc] = text
            if row.get("doc_cluster") is not None:
                clusters[task][doc] = row["doc_cluster"]
        if kinds.get(task) in ("loglikelihood", None):  # None: older files do not name it
            texts[task] = choice_texts(rows, _delimiter(results, task))
            choices |= {(task, *key): chosen for key, chosen in choices_of(rows, texts[task]).items()}
    aggregated = {
        (task, metric, name): (value, number(stderr))
        for task, values in results["results"].items()
        for metric, name, raw, stderr in metrics_of(values)
        if (value := number(raw)) is not None
    }
    better = results["higher_is_better"]
    directions = {key: (better.get(key[0]) or {}).get(key[1]) for key in {*scores, *aggregated}}
    return {
        "scores": dict(scores),
        "results": aggregated,
        "higher_is_better": {key: value for key, value in sorted(directions.items()) if isinstance(value, bool)},
        "answers": dict(answers),
        "hashes": dict(hashes),
        "weighted": dict(weighted),
        "choices": choices,
        "choice_texts": texts,
        "clusters": dict(clusters),
        "groups": groups_of(results),
    }


def _delimiter(results: Mapping[str, Any], task: str) -> str | None:
    """What lm-eval puts before each choice; None where the results do not say. Under a chat template it is nothing,
    unless a prefix of the answer stands before it that does not end in white space (`construct_requests`)."""
    config = results["configs"].get(task) or {}
    delimiter, prefix = config.get("target_delimiter"), config.get("gen_prefix")
    if results.get("chat_template_sha") and not (isinstance(prefix, str) and prefix and not prefix[-1].isspace()):
        return ""
    return delimiter if isinstance(delimiter, str) else None


def _identity(results: Mapping[str, Any]) -> dict[str, Any]:
    """What lm-eval's results say about model, seeds, tasks and prompts."""
    config = results["config"]
    tasks = {
        task: {
            "version": results["versions"].get(task),
            **{key: settings.get(key) for key in (*TASK_KEYS, *PROMPT_KEYS, "generation_kwargs") if key in settings},
        }
        for task, settings in sorted(results["configs"].items())
    }
    recorded = {key: config.get(key) for key in (*MODEL_KEYS, *SEED_KEYS)}
    harness = {"harness": results["harness"]} if "harness" in results else {}  # an endpoint's, or inspect_ai's
    return {**recorded, **{key: results.get(key) for key in RUN_KEYS}, **harness, "tasks": tasks}
