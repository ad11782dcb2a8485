"""Workloads and earlier results meet damaged files: the reader gives requests that fit, or names the file's fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from evalengine.bench.throughput_compare import read_others
from evalengine.bench.workload_files import read_workload
from evalengine.engine.request import GenerateRequest
from evalengine.errors import ConfigError
from tests.fuzz.cases import Case, cases

VOCAB_SIZE = 20
LINES = (
    {"kind": "segment", "ids": [5, 6]},
    {"kind": "generate", "prompt": [1, 2], "max_tokens": 3},
    {"kind": "loglikelihood", "segments": [0], "context": [7], "continuations": [[8], [9, 3]]},
)
ROW = {"engine": "e", "mode": "fast", "preset": "p", "workload": "w", "requests": 3, "wall_s": 1.5}
PIECES = (b"[", b"]", b"{", b"}", b",", b'"', b"null", b"true", b"-1", b"1e400", b"NaN", b"99", b"\xff", b"\n", b"0.5")


def mutated(case: Case, data: bytes) -> bytes:
    """The data with one to four bytes or pieces of JSON changed."""
    content = bytearray(data)
    for _ in range(case.randint(1, 4)):
        at = case.randrange(len(content))
        kind = case.randrange(4)
        if kind == 0:
            content[at] = case.randrange(256)
        elif kind == 1:
            content[at:at] = case.choice(PIECES)
        elif kind == 2:
            del content[at : at + case.randint(1, 9)]
        else:
            content[at : at + 1] = case.choice(PIECES)
        if not content:
            break
    return bytes(content)


def test_damaged_workloads_are_refused_or_hold_requests_that_fit(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(line) for line in LINES).encode()
    path = tmp_path / "own.jsonl.gz"
    for case in cases("workload_files", 600):
        packed = case.random() < 0.2
        data = mutated(case, gzip.compress(text)) if packed else gzip.compress(mutated(case, text))
        path.write_bytes(data)
        with case.named(data):
            try:
                requests = read_workload(path, VOCAB_SIZE)
            except ConfigError as error:
                assert str(path) in str(error) and "Traceback" not in str(error)
                continue
            assert [r.request_id for r in requests] == list(range(len(requests))) and requests
            for r in requests:
                generates = isinstance(r, GenerateRequest)
                ids = r.prompt_ids if generates else r.context_ids + r.continuation_ids
                assert ids and 0 <= min(ids) <= max(ids) < VOCAB_SIZE
                assert r.params.max_tokens > 0 if generates else r.context_ids and r.continuation_ids


def test_damaged_results_are_refused_or_hold_seconds(tmp_path: Path) -> None:
    text = json.dumps({"rows": [ROW, {**ROW, "engine": "evalengine"}]}).encode()
    path = tmp_path / "theirs.json"
    for case in cases("throughput_compare", 400):
        path.write_bytes(mutated(case, text))
        with case.named(path.read_bytes()):
            try:
                others = read_others(path)
            except ConfigError as error:
                assert str(path) in str(error)
                continue
            assert all(0 < s < float("inf") for column in others for s in column.seconds.values())
