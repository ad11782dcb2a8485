"""An lm-eval output folder whose model was our engine: `records-<time>-<digest>/` beside the results.

lm-eval's files hold what was asked and how it scored, the records every token and logprob behind it. The results name
the records and their digest, and each response in the samples is compared with its records: joined, the files are a run
as any of ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.folder import DIGEST
from evalengine.records.manifest_data import MANIFEST, Manifest, glance_at_manifest
from evalengine.records.shapes import Sha256, Text, with_fields, wrong
from evalengine.report.numbers import exact_sum, same_number
from evalengine.report.read.identities import MODEL_NAMES
from evalengine.report.read.lm_eval_folder import RUN_KEYS, SEED_KEYS, newest, of_lm_eval
from evalengine.report.read.lm_eval_samples import ROLLING
from evalengine.report.read.run import Item, Key, Loaded, Run, parsed
from evalengine.report.read.run_folder import read_evidence, same_documents, same_metrics

MODELS = ("evalengine", "EvalEngineLM")  # as lm-eval names it: by its registered name, or made in Python
LM_EVAL_KEYS = ("model", "limit", "gen_kwargs", "tasks", *SEED_KEYS, *RUN_KEYS)  # what lm-eval decides in such a run
AGAIN = "run the evaluation again, or copy the folder of records beside the results"
_NAMED = with_fields({"records": Text, "digest": Sha256})


def load_results(path: Path) -> Loaded:
    """The newest run of an lm-eval output folder, or that of a results file; with its records where our engine left
    them. Raises `ConfigError` for what is missing, damaged or edited, and for records of another run."""
    results, samples = newest(path)
    run = of_lm_eval(path, results, samples)
    folder = _records_folder(path if path.is_dir() else path.parent, results)
    if folder is not None:
        run = _joined(run, folder, results["config"].get("evalengine"), samples)
    return Loaded(run, results, samples)


def _records_folder(where: Path, results: Mapping[str, Any]) -> Path | None:
    """The folder of records that the results name; results from before lm-eval 0.4.10 name none, and the folder is the
    last one that was begun while lm-eval ran."""
    config = results["config"]
    if (named := config.get("evalengine")) is not None:
        if problem := wrong(named, _NAMED):
            raise ConfigError(f"{where}: its results name no records ({problem}): they were edited; {AGAIN}")
        if Path(named["records"]).name != named["records"] or not (where / named["records"]).is_dir():
            raise ConfigError(f"{where / Path(named['records']).name}: missing, but the results name it; {AGAIN}")
        return where / str(named["records"])
    if config.get("model") not in MODELS:
        return None
    return max(_begun_while(where, results), key=lambda folder: folder.name, default=None)


def _begun_while(where: Path, results: Mapping[str, Any]) -> Iterator[Path]:
    """Folders of records whose run was begun between the start and the end of these results."""
    try:
        start = float(results.get("date") or 0)
        end = start + float(results.get("total_evaluation_time_seconds") or 0)
    except (TypeError, ValueError, OverflowError):
        return
    for folder in sorted(where.glob("records-*")):
        if (folder / DIGEST).is_file():
            try:
                begun = parsed(glance_at_manifest(folder / MANIFEST).started)
            except (OSError, ValueError):
                continue
            if begun is not None and start - 1 <= begun.timestamp() <= end:
                yield folder


def _joined(
    run: Run, folder: Path, named: Mapping[str, Any] | None, samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Run:
    evidence = read_evidence(folder)
    if named is not None and named["digest"] != evidence.digest:
        raise ConfigError(f"{folder}: its digest is {evidence.digest}, the results name {named['digest']}; {AGAIN}")
    _numbered_from_zero(run.source, samples)
    same_documents(run.source, evidence.items, run.hashes)
    _same_responses(run, evidence.items)
    same_metrics(run.source, run.scores, run.results)
    return replace(
        run,
        kind="run",
        digest=evidence.digest,
        task_digests=evidence.task_digests,
        identity=_identity(run, evidence.manifest),
        manifest=evidence.manifest,
        items=evidence.items,
        records=folder,
    )


def _identity(run: Run, manifest: Manifest) -> dict[str, Any]:
    """The engine's part from the manifest, the tasks' from lm-eval's results."""
    names = {name: value for name, value in run.model_args.items() if name in MODEL_NAMES}
    decided = {name: run.identity.get(name) for name in LM_EVAL_KEYS}
    return {**manifest.identity, **decided, "model_args": names}


def _numbered_from_zero(path: Path, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raises `ConfigError` if `--samples` chose documents: lm-eval gives the model numbers that it does not write."""
    for task, rows in samples.items():
        documents = {row["doc_id"] for row in rows}
        if documents != {*range(len(documents))}:
            raise ConfigError(
                f"{path}: {task}: its documents were chosen with --samples, and are numbered otherwise in its records; "
                "run it with --limit, or without either"
            )


def _same_responses(run: Run, items: Mapping[Key, Item]) -> None:
    """Raises `ConfigError` unless each response in the samples is that of its records: a log-likelihood to the last
    bit, a text to the letter."""
    windows: dict[Key, list[float]] = defaultdict(list)
    for (task, doc, _, repeat), item in items.items():
        if item.kind == ROLLING and item.logprobs is not None:
            windows[task, doc, 0, repeat] += item.logprobs.tolist()
    for key, response in run.items.items():
        if response.kind == ROLLING:
            equal = response.sum_logprob is not None and same_number(response.sum_logprob, exact_sum(windows[key]))
        else:
            record = items.get(key)
            equal = record is not None and _same_response(response, record)
        if not equal:
            raise ConfigError(f"{run.source}: samples_{key[0]}_*.jsonl: the response to document {key[1]}, request "
                              f"{key[2]} is not that of its records: one of them was edited; {AGAIN}")  # fmt: skip


def _same_response(response: Item, record: Item) -> bool:
    if record.kind == "generate_until":
        return response.text == record.text
    if response.sum_logprob is None or record.sum_logprob is None:
        return False
    return same_number(response.sum_logprob, record.sum_logprob)
