"""Runs made by hand for the tests of `compare`: every digest is real, every number is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.records.digest import digests, leaf_hash
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import RequestRecord, ids_sha256
from evalengine.report.read.run import Item, Run

TASK, FILTER, METRIC = "sums", "strict-match", "exact_match"
KEY = (TASK, METRIC, FILTER)
IDENTITY: dict[str, Any] = {
    "contract_version": 1,
    "weights": "a" * 64,
    "model_spec": {"rope": {"theta": 1e4}},
    "tokenizer": {"sha256": "b" * 64},
    "numerics": "exact",
    "dtype": "bfloat16",
    "engine": {"max_model_len": None},
    "prompts": "c" * 64,
    "seed": 0,
    "limit": None,
    "apply_chat_template": False,
    "datasets": {TASK: {"sha256": "d" * 64, "fewshot_sha256": None}},
    "tasks": {TASK: {"version": 1.0, "num_fewshot": 0, "generation": {"max_gen_toks": 8, "temperature": 0.0}}},
}


def record(doc: int, ids: Sequence[int], logprobs: Sequence[float], kind: str, prompt: Sequence[int]) -> RequestRecord:
    """The record of the document's only request."""
    values = np.asarray(logprobs, dtype=np.float32)
    text = " ".join(f"t{i}" for i in ids)
    return RequestRecord(ids, values, "stop", text, True, TASK, doc, 0, 0, kind, prompt, ids_sha256(prompt), 0)


def item(r: RequestRecord) -> Item:
    """The item that a report reads from the record."""
    hashes = (leaf_hash(r).hex(), r.prompt_sha256, ids_sha256(r.output_ids))
    total = float(r.logprobs.sum())
    return Item(*r.key, r.kind, *hashes, list(r.output_ids), r.logprobs, total, r.text, 0)


def run(
    outputs: Mapping[int, tuple[Sequence[int], Sequence[float]]],
    scores: dict[int, float] | None = None,
    answers: dict[int, str] | None = None,
    kind: str = "generate_until",
    asks: Mapping[int, Sequence[int]] | None = None,
    **identity: Any,
) -> Run:
    """A run whose documents have these (output ids, logprobs); by default a document's score is 1, its answer its
    first output id, and its prompt's ids (`asks`) are [doc, 1]."""
    asked = {doc: (asks or {}).get(doc, [doc, 1]) for doc in outputs}
    records = [record(doc, *outputs[doc], kind, asked[doc]) for doc in sorted(outputs)]
    values = dict.fromkeys(outputs, 1.0) | (scores or {})
    texts = {doc: str(outputs[doc][0][0]) for doc in outputs} | (answers or {})
    return Run(
        source=Path("results/x"),
        kind="run",
        name="x",
        digest=digests(records).run,
        task_digests=digests(records).tasks,
        identity={**IDENTITY, **identity},
        manifest=Manifest({"engine": {"max_num_seqs": 8, "stats": {"seconds": 1.0}}, "files": {}}),
        items={r.key: item(r) for r in records},
        scores={KEY: values},
        results={KEY: (float(np.mean(list(values.values()))), None)},
        higher_is_better={KEY: True},
        answers={(TASK, FILTER): texts},
        hashes={TASK: {doc: (f"doc{doc}", f"prompt{asked[doc]}", f"target{doc}") for doc in outputs}},
    )


BASE = {0: ([5, 6, 7], [-0.5, -0.25, -1.0]), 1: ([8, 9], [-0.125, -2.0]), 2: ([4], [-0.75])}
NEXT = float(np.nextafter(np.float32(-0.25), np.float32(0)))  # the float32 number after -0.25
BIT = {**BASE, 0: ([5, 6, 7], [-0.5, NEXT, -1.0])}  # differs from BASE in one bit of one logprob
TOKEN = {**BASE, 0: ([5, 6, 3], [-0.5, -0.25, -1.03])}  # differs from BASE in the last token of document 0
