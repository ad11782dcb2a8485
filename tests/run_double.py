"""Run folders as a run leaves them, made without a run: tests give the records, the real writers write the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.config.schema import Config
from evalengine.records.digest import digests
from evalengine.records.evidence import FILES, SHA256, bind
from evalengine.records.lm_eval import ModelInfo, Sample, TaskResult, results_dict, sample_row
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import RequestRecord, ids_sha256, write_records

ISO = "2026-01-02T03-04-05.678901"


def sha(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def generated(doc: int, seed: int = 0, task: str = "sums", length: int = 3) -> RequestRecord:
    """A generation with random ids and logprobs, a function of the arguments."""
    draw = np.random.default_rng([doc, seed, len(task)])
    prompt, output = draw.integers(0, 1000, 5).tolist(), draw.integers(0, 1000, length).tolist()
    logprobs = -draw.random(length, dtype=np.float32)
    return RequestRecord(
        *(output, logprobs, "stop", f"is {doc}", False),
        *(task, doc, 0, 0, "generate_until", prompt, ids_sha256(prompt), 0),
    )


def write_run(
    path: Path,
    records: list[RequestRecord],
    score: Callable[[int], float] = lambda doc: float(doc % 3 == 0),
    bound: bool = True,
) -> Path:
    """A finished run of these generations, under two filters.

    bound: whether the manifest lists the files; False gives a run of the time before manifests did.
    """
    path.mkdir(parents=True)
    write_records(path / "records.parquet", records)
    tasks = []
    for task in sorted({record.task for record in records}):
        docs = sorted({record.doc_id for record in records if record.task == task})
        samples = [_sample(task, doc, name, score(doc)) for name in ("strict", "flexible") for doc in docs]
        tasks.append(_result(task, samples, float(np.mean([score(doc) for doc in docs])) if docs else 0.0))
        lines = [json.dumps(sample_row(sample)) + "\n" for sample in samples]
        (path / f"samples_{task}_{ISO}.jsonl").write_text("".join(lines), encoding="utf-8")
    model = ModelInfo("m", "m", "float32", None, None, 1, 64, "cpu", None)
    results = results_dict(tasks, model, Config(), seconds=1.0)
    (path / f"results_{ISO}.json").write_text(json.dumps(results), encoding="utf-8")
    digest = digests(records).run
    content = {"digest": digest, "task_digests": digests(records).tasks, "identity": {"weights": "w"}, "code": {}}
    manifest = bind(Manifest(content), path, digest) if bound else Manifest(content)
    (path / "manifest.json").write_text(manifest.file_text(), encoding="utf-8")
    (path / "digest.txt").write_text(digest + "\n", encoding="utf-8")
    return path


def bind_again(path: Path, **changes: Any) -> None:
    """Binds the run's files as they are now, with these changes of the manifest, as if the run had written them."""
    (path / "report.html").unlink(missing_ok=True)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    rest = {name: value for name, value in manifest.items() if name not in (FILES, SHA256)}
    digest = (path / "digest.txt").read_text(encoding="utf-8").strip()
    bound = bind(Manifest({**rest, **changes}), path, digest)
    (path / "manifest.json").write_text(bound.file_text(), encoding="utf-8")


def _sample(task: str, doc: int, name: str, value: float) -> Sample:
    hashes = [sha(task, doc, kind) for kind in ("doc", "prompt", "target")]
    resps, answer = [[f"is {doc}"]], [str(doc)]
    return Sample(doc, {"q": doc}, "t", [("q", {})], resps, answer, name, {"exact_match": value}, *hashes)


def _result(task: str, samples: list[Sample], mean: float) -> TaskResult:
    joined = "".join(s.doc_hash + s.prompt_hash + s.target_hash for s in samples)
    metrics = {f"exact_match,{n}": mean for n in ("strict", "flexible")}
    metrics |= {f"exact_match_stderr,{n}": "N/A" for n in ("strict", "flexible")}
    count = len({s.doc_id for s in samples})
    task_hash = hashlib.sha256(joined.encode()).hexdigest()
    return TaskResult(task, 1.0, 0, metrics, {"exact_match": True}, {}, count, count, task_hash, samples)
