"""A run folder of ours, read as evidence: its files are those that the run wrote, and its records give its digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.records.digest import MANY, leaf_hash, merkle_root
from evalengine.records.evidence import AGAIN, open_run
from evalengine.records.folder import DIGEST, RECORDS
from evalengine.records.manifest_data import MANIFEST, Manifest
from evalengine.records.schema import RequestRecord, ids_sha256, read_kinds, read_records
from evalengine.records.shapes import Sha256, fits
from evalengine.report.numbers import exact_sum, exp, same_value
from evalengine.report.read.lm_eval_folder import newest, outcome_of
from evalengine.report.read.lm_eval_samples import ROLLING, asks_nothing
from evalengine.report.read.run import Item, Key, Loaded, Run, ScoreKey
from evalengine.util.forked import ForkedTask, spread
from evalengine.util.plain_files import read_bytes

MANY_SAMPLES = 4_000  # rows whose outcome earns a process: some 0.1 s of work
# What the Parquet reader and a wrong value in a column can raise.
DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


def load_folder(path: Path, page: bool = True) -> Loaded:
    """Reads a finished run. Raises `ConfigError` if it is unfinished, or if a file is missing, damaged or edited.

    page: whether `report.html` is checked, too.
    """
    manifest = open_run(path, page)
    if manifest.identity.get("harness") == "lm-eval":
        raise ConfigError(f"{path}: the records of a run by lm-eval; give the folder of its results: {path.parent}")
    results, samples = newest(path)
    worthwhile = sum(map(len, samples.values())) >= MANY_SAMPLES
    with ForkedTask(lambda: outcome_of(results, samples, read_kinds(path / RECORDS)), worthwhile) as judged:
        evidence = _evidence(path, manifest)
        outcome = judged.result()
    items = evidence.items
    same_documents(path, items, outcome["hashes"])
    same_metrics(path, outcome["scores"], outcome["results"])
    run = Run(
        source=path,
        kind="run",
        name=path.resolve().name,
        digest=evidence.digest,
        task_digests=evidence.task_digests,
        identity=evidence.manifest.identity,
        manifest=evidence.manifest,
        items=items,
        cut=_cut(items, evidence.endings),
        **outcome,
    )
    return Loaded(run, results, samples, evidence.endings)


def _cut(items: Mapping[Key, Item], endings: Mapping[Key, tuple[str, int]]) -> dict[str, frozenset[int]]:
    """The documents of each task with a generation that the length limit ended; a task without one is missing."""
    documents: dict[str, set[int]] = {}
    for (task, doc, _, _), item in items.items():
        if item.kind == "generate_until" and endings[item.key][0] == "length":
            documents.setdefault(task, set()).add(doc)
    return {task: frozenset(found) for task, found in documents.items()}


@dataclass(frozen=True)
class RunEvidence:
    """What the engine left of a run: everything but metrics."""

    manifest: Manifest
    digest: str
    task_digests: dict[str, str]
    items: dict[Key, Item]  # in key order
    endings: dict[Key, tuple[str, int]]  # (finish reason, prompt tokens), as `schema.read_endings` gives them


def read_evidence(path: Path) -> RunEvidence:
    """Reads the records of a folder and what vouches for them; every digest is computed anew.

    Raises: ConfigError if the run is unfinished, or if a file is missing, damaged or edited.
    """
    return _evidence(path, open_run(path, judge=False))


def _evidence(path: Path, manifest: Manifest) -> RunEvidence:
    """`read_evidence` of a folder that `open_run` has checked."""
    digest = _read_digest(path)
    records = _read_records(path / RECORDS)
    leaves = spread(partial(_leaves, path / RECORDS), records, MANY)
    if merkle_root(leaves).hex() != digest:
        raise ConfigError(
            f"{path / DIGEST}: it says {digest}, but the records give {merkle_root(leaves).hex()}: "
            f"{RECORDS} or {DIGEST} was edited or damaged; {AGAIN}"
        )
    items = {record.key: _item(record, leaf) for record, leaf in zip(records, leaves, strict=True)}
    tasks = tree_digests(items)
    if (manifest.digest, manifest.task_digests) != (digest, tasks):
        raise ConfigError(f"{path / MANIFEST}: its digests are not those of {RECORDS}: it was edited; {AGAIN}")
    endings = {record.key: (record.finish_reason, len(record.prompt_ids)) for record in records}
    return RunEvidence(manifest, digest, tasks, items, endings)


def tree_digests(items: Mapping[Key, Item]) -> dict[str, str]:
    """Each task's digest (`records.digest.Digests`) from the leaves of items in key order."""
    return {
        task: merkle_root([bytes.fromhex(item.leaf) for item in group]).hex()
        for task, group in groupby(items.values(), key=lambda item: item.task)
    }


def _read_digest(path: Path) -> str:
    try:
        digest = read_bytes(path / DIGEST).decode("utf-8", "replace").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / DIGEST}: cannot be read ({error}); {AGAIN}") from error
    if not fits(digest, Sha256):
        raise ConfigError(f"{path / DIGEST}: not a digest (64 hex digits): it was edited or damaged; {AGAIN}")
    return digest


def _read_records(path: Path) -> list[RequestRecord]:
    """The records in key order, one for each key. Raises `ConfigError` if they are damaged."""
    if not path.is_file():
        raise ConfigError(f"{path}: missing, so nothing can be compared; {AGAIN}")
    try:
        records = sorted(read_records(path, lists=False), key=lambda record: record.key)
        if len({record.key for record in records}) == len(records):
            return records
    except DAMAGED as error:
        raise _damaged(path, error) from error
    raise _contradicts(path)


def _leaves(path: Path, records: Sequence[RequestRecord]) -> list[bytes]:
    """The digest's leaves. Raises `ConfigError` for a record that is not consistent in itself."""
    try:
        if all(_whole(record) for record in records):
            return [leaf_hash(record) for record in records]
    except DAMAGED as error:
        raise _damaged(path, error) from error
    raise _contradicts(path)


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: damaged, or no records of a run ({error}); {AGAIN}")


def _contradicts(path: Path) -> ConfigError:
    return ConfigError(f"{path}: its columns contradict each other: it was edited; {AGAIN}")


def _whole(record: RequestRecord) -> bool:
    lengths = len(record.output_ids) == len(record.logprobs)
    return lengths and record.logprobs.dtype == np.float32 and record.prompt_sha256 == ids_sha256(record.prompt_ids)


def _item(record: RequestRecord, leaf: bytes) -> Item:
    return Item(
        task=record.task,
        doc_id=record.doc_id,
        request_index=record.request_index,
        repeat=record.repeat,
        kind=record.kind,
        leaf=leaf.hex(),
        prompt_sha256=record.prompt_sha256,
        output_sha256=ids_sha256(record.output_ids),
        output_ids=np.asarray(record.output_ids).tolist(),
        logprobs=record.logprobs,
        sum_logprob=exact_sum(record.logprobs.tolist()),
        text=record.text,
        truncated=record.truncated,
    )


def same_documents(path: Path, items: Mapping[Key, Item], hashes: Mapping[str, Mapping[int, Any]]) -> None:
    """Raises `ConfigError` unless exactly the recorded documents have samples: a shortened or exchanged samples file
    is found.

    An empty text of a rolling task has a sample and no record: there is nothing to score.
    """
    kinds = {item.task: item.kind for item in items.values()}
    documents: dict[str, set[int]] = {task: set() for task in {*kinds} | {*hashes}}
    for item in items.values():
        documents[item.task].add(item.doc_id)
    for task, recorded in sorted(documents.items()):
        sampled = {*hashes.get(task, {})}
        if kinds.get(task) == ROLLING:
            sampled = {doc for doc in sampled if doc in recorded or not asks_nothing(hashes[task][doc])}
        if recorded != sampled:
            where = sorted(recorded ^ sampled)[0]
            raise ConfigError(f"{path}: samples_{task}_*.jsonl and {RECORDS} differ from document {where} on; {AGAIN}")


def same_metrics(path: Path, scores: Mapping[ScoreKey, Mapping[int, float]], results: Mapping[ScoreKey, Any]) -> None:
    """Raises `ConfigError` unless each metric with a number for each document is their mean, or exp of minus their mean
    (LAMBADA's perplexity of log-likelihoods)."""
    for key in scores.keys() & results.keys():
        mean, result = exact_sum(scores[key].values()) / len(scores[key]), float(results[key][0])
        statistic = "mean"
        if key[1] == "perplexity":
            statistic, mean = "perplexity", exp(-mean)
        if not same_value(mean, result, 1e-9, 1e-12):
            task, metric, name = key
            raise ConfigError(
                f"{path}: results_*.json has {metric},{name} of {task} at {result}, but its documents' {statistic} is "
                f"{mean}: one of the two files was edited; {AGAIN}"
            )
