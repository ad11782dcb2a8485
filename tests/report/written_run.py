"""Run folders with real files around made-up texts: every digest, hash and manifest is what a run would write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.config.schema import Config
from evalengine.records.digest import digests
from evalengine.records.evidence import bind
from evalengine.records.lm_eval import ModelInfo, Sample, TaskResult, results_dict, sample_row
from evalengine.records.manifest import build_manifest
from evalengine.records.manifest_data import Manifest, Model, RunCounts, RunTimings
from evalengine.records.schema import RequestRecord, ids_sha256, write_records
from evalengine.records.tokens import tokens_json
from evalengine.report.numbers import mean
from evalengine.version import CONTRACT_VERSION

ISO = "2026-01-02T03-04-05.678901"
IDENTITY = {"weights": "a" * 64, "tokenizer": "b" * 64, "prompts": "c" * 64, "tasks": {}, "dtype": "float32"}


@dataclass(frozen=True)
class Doc:
    """One generated document: its texts, and the pieces that its tokens stand for."""

    output: str
    prompt: str = "Question: how many?\nAnswer:"
    target: str = "#### 4"
    answer: str = "4"
    score: float = 1.0
    pieces: Sequence[str] = ()  # the default is the output's characters, at most 50
    finish: str = "stop"
    truncated: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


def write_generations(
    path: Path,
    docs: Sequence[Doc],
    task: str = "sums",
    numerics: str = "exact",
    shift: float = 0.0,
    model: str = "tiny",
    weights: str = "a" * 64,
) -> Path:
    """A finished run of one generating task. shift: added to every logprob, as other numerics would. model, weights:
    the model's name and its hash."""
    vocabulary: dict[str, int] = {}
    records = [_record(task, number, doc, vocabulary, shift) for number, doc in enumerate(docs)]
    samples = [_sample(task, number, doc) for number, doc in enumerate(docs)]
    whole = mean([doc.score for doc in docs])
    metrics: dict[str, Any] = {"exact_match,strict-match": whole, "exact_match_stderr,strict-match": 0.01}
    pieces = {token: text.encode("utf-8", "replace") for text, token in vocabulary.items()}
    return _write(path, task, records, samples, metrics, {"exact_match": True}, pieces, numerics, model, weights)


def write_choices(
    path: Path, sums: Sequence[Sequence[float]], targets: Sequence[int], task: str = "pick", numerics: str = "exact"
) -> Path:
    """A finished run of a multiple-choice task; sums: the log-likelihood of each choice, one token a choice."""
    records, samples, accuracies = [], [], []
    for number, (row, target) in enumerate(zip(sums, targets, strict=True)):
        for place, value in enumerate(row):
            ids, prompt = [place], [9, number]
            answer = (ids, np.array([value], dtype=np.float32), "stop", "", False)
            own = (task, number, place, 0, "loglikelihood", prompt, ids_sha256(prompt), 0)
            records.append(RequestRecord(*answer, *own))
        acc = float(int(np.argmax(row)) == target)
        accuracies.append(acc)
        pairs = [(value, False) for value in row]
        arguments = [(f"Question {number}", f" choice {place}") for place in range(len(row))]
        samples.append(Sample(number, {"q": number}, target, arguments, [[pair] for pair in pairs], pairs, "none",
                              {"acc": acc}, *_hashes(task, number, Doc(""))))  # fmt: skip
    metrics: dict[str, Any] = {"acc,none": float(np.mean(accuracies)), "acc_stderr,none": 0.1}
    pieces = {place: f" choice {place}".encode() for place in range(max(map(len, sums)))}
    return _write(path, task, records, samples, metrics, {"acc": True}, pieces, numerics)


def _record(task: str, number: int, doc: Doc, vocabulary: dict[str, int], shift: float) -> RequestRecord:
    pieces = list(doc.pieces or doc.output[:50])
    ids = [vocabulary.setdefault(piece, len(vocabulary)) for piece in pieces]
    logprobs = -np.arange(len(ids), dtype=np.float32) / 10 + np.float32(shift)
    prompt = [number, *doc.prompt.encode("utf-8", "replace")[:40]]
    answer = (ids, logprobs, doc.finish, _without_surrogates(doc.output), True)
    own = (task, number, 0, 0, "generate_until", prompt, ids_sha256(prompt), doc.truncated)
    return RequestRecord(*answer, *own)


def _sample(task: str, number: int, doc: Doc) -> Sample:
    fields = {"question": doc.prompt.split("\n\n")[-1], **doc.fields}
    arguments, resps = [(doc.prompt, {"until": ["\n"]})], ([[doc.output]], [doc.answer])
    scores = {"exact_match": doc.score}
    return Sample(number, fields, doc.target, arguments, *resps, "strict-match", scores, *_hashes(task, number, doc))


def _without_surrogates(text: str) -> str:
    """Parquet's strings are UTF-8: a lone surrogate reaches a report only through lm-eval's JSON."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _hashes(task: str, number: int, doc: Doc) -> list[str]:
    parts = (f"{task}{number}", doc.prompt, doc.target)
    return [hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest() for part in parts]


def _write(
    path: Path,
    task: str,
    records: list[RequestRecord],
    samples: list[Sample],
    metrics: dict[str, Any],
    better: dict[str, bool],
    pieces: dict[int, bytes],
    numerics: str,
    model_name: str = "tiny",
    weights: str = "a" * 64,
) -> Path:
    path.mkdir(parents=True)
    write_records(path / "records.parquet", records)
    (path / "tokens.json").write_text(json.dumps(tokens_json(pieces)), encoding="utf-8")
    lines = [json.dumps(sample_row(sample)) + "\n" for sample in samples]  # ASCII holds lone surrogates as escapes
    (path / f"samples_{task}_{ISO}.jsonl").write_text("".join(lines), encoding="ascii")
    joined = "".join(s.doc_hash + s.prompt_hash + s.target_hash for s in samples)
    hashed = hashlib.sha256(joined.encode()).hexdigest()
    result = TaskResult(task, 1.0, 0, metrics, better, {}, len(samples), len(samples), hashed, samples)
    model = ModelInfo("tiny", "tiny", "float32", None, None, 1, 64, "cpu", None)
    results = results_dict([result], model, Config(), seconds=1.0)
    (path / f"results_{ISO}.json").write_text(json.dumps(results), encoding="utf-8")
    digest = digests(records).run
    manifest = bind(_manifest(task, records, digest, numerics, model_name, weights), path, digest)
    (path / "manifest.json").write_text(manifest.file_text(), encoding="utf-8")
    (path / "digest.txt").write_text(digest + "\n", encoding="utf-8")
    return path


def _manifest(
    task: str, records: list[RequestRecord], digest: str, numerics: str, model_name: str, weights: str
) -> Manifest:
    stats = {"num_steps": 3, "num_computed_tokens": 10, "num_cached_tokens": 2, "num_preemptions": 0}
    stats |= {"largest_batch": 2, "largest_step": 8}
    model = Model(
        name=model_name,
        source=f"models/{model_name}",
        revision=None,
        format="safetensors",
        architecture="Tiny",
        num_parameters=1,
        weights_sha256="a",
        eos_token_ids=[0],
        prefix_token_id=None,
        processors={},
        adapter={},
    )
    manifest = build_manifest(
        identity={"contract_version": CONTRACT_VERSION, **IDENTITY, "numerics": numerics, "weights": weights},
        model=model,
        tokenizer={"sha256": "b"},
        datasets={task: {"dataset": "made", "name": None, "split": "test", "rows": 2, "sha256": "d" * 64}},
        device="cpu",
        started=1767323045.0,
        command=["task=" + task, "output_dir=my results"],
        digests=replace(digests(records), run=digest),
        counts=RunCounts(len(records), len(records), 0, 0, 30, 60),
        timings=RunTimings(0.1, 2.0 if numerics == "fast" else 4.0, 4.5),
        engine={"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "stats": stats},
    )
    return Manifest({**manifest.content, "run_id": "0" * 8})
