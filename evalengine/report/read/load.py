"""A run from disk, whatever it is: a run folder of ours, an output folder of lm-evaluation-harness, a log of
inspect_ai, a baseline file; with its texts for the HTML report.

A run's folder is read as evidence: its files are those that the run wrote, and its records give its digest. Two kinds
of folder hold records. A run folder of ours does. So does an output folder of lm-eval whose model was our engine:
`records-<time>-<digest>/` is next to the results, which name it and its digest. lm-eval's files hold what was requested
and how it scored, the records every token and logprob. Each response in the samples is compared with its records, and
joined they are a run like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError, listed, readable
from evalengine.records.digest import MANY, leaf_hash, merkle_root
from evalengine.records.evidence import AGAIN, is_run_folder, open_run
from evalengine.records.folder import DIGEST, RECORDS
from evalengine.records.lm_eval_file import results_files
from evalengine.records.manifest_data import MANIFEST, Manifest, missing_for_page
from evalengine.records.schema import RequestRecord, ids_sha256, read_kinds, read_records
from evalengine.records.shapes import Sha256, Text, fits, with_fields, wrong
from evalengine.report.numbers import exact_sum, exp, mean, same_number, same_value
from evalengine.report.read.identities import MODEL_NAMES
from evalengine.report.read.lm_eval import ROLLING, RUN_KEYS, SEED_KEYS, asks_nothing, newest, of_lm_eval, outcome_of
from evalengine.report.read.names import RESULTS, experiment_runs, runs_in, stands_for
from evalengine.report.read.run import Item, Key, Run, RunData, tree_digests
from evalengine.util.forked import ForkedTask, spread
from evalengine.util.plain_files import read_bytes
from evalengine.util.plugins import load

MANY_SAMPLES = 4_000  # rows whose outcome earns a process: some 0.1 s of work
# What the Parquet reader and a wrong value in a column can raise.
DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
LM_EVAL_KEYS = ("model", "limit", "gen_kwargs", "tasks", *SEED_KEYS, *RUN_KEYS)  # what lm-eval decides in such a run
COPY_RECORDS = "run the evaluation again, or copy the folder of records next to the results"
_NAMED = with_fields({"records": Text, "digest": Sha256})


def load_run(path: str | Path, page: bool = True) -> Run:
    """A run folder, an lm-eval output folder (or its results file), a log of inspect_ai, or a baseline file; or a name
    that stands for one (`names`).

    page: whether the `report.html` of a run folder is checked, too.

    Raises `ConfigError` (the file at fault, and the fix) for what is missing, unreadable, unfinished, damaged or
    edited.
    """
    return load_data(path, page).run


def _is_inspect_log(path: Path) -> bool:
    """Whether the file says that it is a log of inspect_ai."""
    if path.suffix != ".json":
        return path.suffix == ".eval"
    with open(path, "rb") as file:
        beginning = file.read(400)
    return b'"eval"' in beginning and b'"version"' in beginning


def load_data(name: str | Path, page: bool = True) -> RunData:
    """Read the run that `load_run` reads, with its texts."""
    with readable(name):
        path = Path(stands_for(name))
        if path.is_file():
            if results_files(path):
                return load_results(path)
            if _is_inspect_log(path):
                return load("evalengine.integrations.inspect_ai.log:load_inspect_log")(path)
            from evalengine.report.read.baseline import is_baseline, load_baseline  # runs of ours need no other reader

            if not is_baseline(path) and is_run_folder(path.parent):
                raise ConfigError(f"{path}: one file of a run; give the folder: {path.parent}")
            return RunData(load_baseline(path), {}, {})
        if not path.is_dir():
            raise ConfigError(
                f"{path}: no such file or folder; name a run's folder, or latest: the newest in {RESULTS}/"
            )
        any(path.iterdir())  # raises where permission is lacking, in place of files that seem to be missing
        if is_run_folder(path):
            return load_folder(path, page)
        if results_files(path):
            return load_results(path)
        # lm-eval writes into <output_path>/<model>/, and results/ may hold a single run.
        if of_experiment := experiment_runs(path):
            many, first = len(of_experiment), of_experiment[0]
            raise ConfigError(f"{path}: an experiment of {many} runs; name one of them, such as {first}")
        runs, _ = runs_in(path)
        if len(runs) == 1:
            return load_data(runs[0], page)
        if runs:
            names = listed([str(run.relative_to(path)) for run in runs], 4)
            raise ConfigError(f"{path}: it holds {len(runs)} runs ({names}); name one of them")
        raise ConfigError(f"{path}: no run in this folder (neither digest.txt nor results_*.json)")


def load_run_data(path: str | Path, page: bool = True, complete: bool = True) -> RunData:
    """Reads a run with its texts.

    page: whether `report.html` is checked, too. complete: whether the manifest must hold all that a page needs.
    Raises `ConfigError` for what is missing, unfinished, damaged or edited, and for a baseline, which has no texts.
    """
    data = load_data(path, page)
    run = data.run
    if run.kind == "baseline":
        raise ConfigError(f"report: {path}: a baseline holds no texts; name the run's folder")
    if complete and run.kind == "run" and (missing := missing_for_page(run.manifest)):
        raise ConfigError(f"{(run.records or run.source) / MANIFEST}: {missing}; run its command again, or take the "
                          "folder from where it was copied")  # fmt: skip
    return data


def load_folder(path: Path, page: bool = True) -> RunData:
    """Read a finished run of ours. Raises `ConfigError` if it is unfinished, or if a file is missing, damaged or
    edited.

    page: whether `report.html` is checked, too.
    """
    manifest = open_run(path, page)
    if manifest.identity.get("harness") == "lm-eval":
        raise ConfigError(f"{path}: the records of a run by lm-eval; give the folder of its results: {path.parent}")
    results, samples = newest(path)
    worthwhile = sum(map(len, samples.values())) >= MANY_SAMPLES
    with ForkedTask(lambda: outcome_of(results, samples, read_kinds(path / RECORDS)), worthwhile) as judged:
        evidence = read_evidence(path, manifest)
        outcome = judged.result()
    run = Run(source=path, kind="run", name=path.resolve().name, **evidence, **outcome)
    _check_agreement(run)
    return RunData(run, results, samples)


def load_results(path: Path) -> RunData:
    """Read the newest run of an lm-eval output folder, or that of a results file; with its records where our engine
    left them. Raises `ConfigError` for what is missing, damaged or edited, and for records of another run."""
    results, samples = newest(path)
    run = of_lm_eval(path, results, samples)
    if (named := results["config"].get("evalengine")) is not None:
        run = _with_records(run, path if path.is_dir() else path.parent, named)
    return RunData(run, results, samples)


def _with_records(run: Run, where: Path, named: Any) -> Run:
    """The run of lm-eval's files with the tokens of its records. named: what the results say of these."""
    if problem := wrong(named, _NAMED):
        raise ConfigError(f"{where}: its results name no records ({problem}): they were edited; {COPY_RECORDS}")
    folder = where / Path(named["records"]).name
    if folder.name != named["records"] or not folder.is_dir():
        raise ConfigError(f"{folder}: missing, but the results name it; {COPY_RECORDS}")
    evidence = read_evidence(folder, open_run(folder, judge=False))
    if named["digest"] != evidence["digest"]:
        raise ConfigError(
            f"{folder}: its digest is {evidence['digest']}, the results name {named['digest']}; {COPY_RECORDS}"
        )
    for task, hashes in run.hashes.items():  # lm-eval gives the model numbers that it does not write
        if {*hashes} != {*range(len(hashes))}:
            raise ConfigError(
                f"{run.source}: {task}: its documents were chosen with --samples, and are numbered otherwise in its "
                "records; run it with --limit, or without either"
            )
    decided = {name: run.identity.get(name) for name in LM_EVAL_KEYS}
    names = {name: value for name, value in run.model_args.items() if name in MODEL_NAMES}
    evidence |= {"identity": {**evidence["identity"], **decided, "model_args": names}, "cut": run.cut}
    joined = replace(run, kind="run", records=folder, **evidence)
    _check_responses(run, joined.items)
    _check_agreement(joined)
    return joined


def _check_responses(run: Run, items: Mapping[Key, Item]) -> None:
    """Raises `ConfigError` unless each response in the samples is that of its records: a log-likelihood to the last
    bit, a text to the letter."""
    windows: dict[Key, list[float]] = defaultdict(list)
    for (task, doc, _, repeat), item in items.items():
        if item.kind == ROLLING and item.logprobs is not None:
            windows[task, doc, 0, repeat] += item.logprobs.tolist()
    for key, response in run.items.items():
        record = items.get(key)
        if record is not None and record.kind == "generate_until":
            equal = response.text == record.text
        else:
            recorded = exact_sum(windows[key]) if response.kind == ROLLING else record and record.sum_logprob
            equal = None not in (response.sum_logprob, recorded) and same_number(response.sum_logprob, recorded)  # type: ignore[arg-type]
        if not equal:
            raise ConfigError(
                f"{run.source}: samples_{key[0]}_*.jsonl: the response to document {key[1]}, request {key[2]} is not "
                f"that of its records: one of them was edited; {COPY_RECORDS}"
            )


def read_evidence(path: Path, manifest: Manifest) -> dict[str, Any]:
    """`Run`'s digests, identity, manifest, items and cut documents, from a folder that `open_run` has checked.

    Every digest is computed anew. Raises `ConfigError` if a file is missing, damaged or edited.
    """
    try:
        digest = read_bytes(path / DIGEST).decode("utf-8", "replace").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / DIGEST}: cannot be read ({error}); {AGAIN}") from error
    if not fits(digest, Sha256):
        raise ConfigError(f"{path / DIGEST}: not a digest (64 hex digits): it was edited or damaged; {AGAIN}")
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
    cut: dict[str, set[int]] = {}
    for record in records:
        if record.kind == "generate_until" and record.finish_reason == "length":
            cut.setdefault(record.task, set()).add(record.doc_id)
    return {
        "digest": digest,
        "task_digests": tasks,
        "identity": manifest.identity,
        "manifest": manifest,
        "items": items,
        "cut": {task: frozenset(documents) for task, documents in cut.items()},
    }


def _read_records(path: Path) -> list[RequestRecord]:
    """The records in key order, one for each key. Raises `ConfigError` if they are damaged."""
    if not path.is_file():
        raise ConfigError(f"{path}: missing, so nothing can be compared; {AGAIN}")
    try:
        records = sorted(read_records(path, lists=False), key=lambda record: record.key)
        if len({record.key for record in records}) < len(records):
            raise ValueError("its columns contradict each other")
        return records
    except DAMAGED as error:
        raise _damaged(path, error) from error


def _leaves(path: Path, records: Sequence[RequestRecord]) -> list[bytes]:
    """The digest's leaves. Raises `ConfigError` for a record that is not consistent in itself."""
    try:
        for r in records:
            lengths = len(r.output_ids) == len(r.logprobs)
            if not lengths or r.logprobs.dtype != np.float32 or r.prompt_sha256 != ids_sha256(r.prompt_ids):
                raise ValueError("its columns contradict each other")
        return [leaf_hash(record) for record in records]
    except DAMAGED as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: damaged, edited, or no records of a run ({error}); {AGAIN}")


def _item(record: RequestRecord, leaf: bytes) -> Item:
    return Item(
        *record.key,
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


def _check_agreement(run: Run) -> None:
    """Raises `ConfigError` unless samples, records and results are of one run: exactly the recorded documents have
    samples, and each metric with a number for each document is their mean, or exp of minus their mean (LAMBADA's
    perplexity of log-likelihoods).

    An empty text of a rolling task has a sample and no record: there is nothing to score.
    """
    kinds = {item.task: item.kind for item in run.items.values()}
    documents: dict[str, set[int]] = {task: set() for task in {*kinds} | {*run.hashes}}
    for item in run.items.values():
        documents[item.task].add(item.doc_id)
    for task, recorded in sorted(documents.items()):
        sampled = {*run.hashes.get(task, {})}
        if kinds.get(task) == ROLLING:
            sampled = {doc for doc in sampled if doc in recorded or not asks_nothing(run.hashes[task][doc])}
        if recorded != sampled:
            raise ConfigError(f"{run.source}: samples_{task}_*.jsonl and {RECORDS} differ from document "
                              f"{min(recorded ^ sampled)} on; {AGAIN}")  # fmt: skip
    for key in run.scores.keys() & run.results.keys():
        statistic, value, result = "mean", mean(run.scores[key].values()), run.results[key][0]
        if key[1] == "perplexity":
            statistic, value = "perplexity", exp(-value)
        if not same_value(value, result, 1e-9, 1e-12):
            task, metric, name = key
            raise ConfigError(
                f"{run.source}: results_*.json has {metric},{name} of {task} at {result}, but its documents' "
                f"{statistic} is {value}: one of the two files was edited; {AGAIN}"
            )
