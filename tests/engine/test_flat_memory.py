"""The memory that a run leaves on the host does not grow with the requests that are finished."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise

import pytest

from benchmarks.null_engine import NullEngine
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest

ROWS, PREFIXES = 1000, 10
MOST_BYTES_A_REQUEST = 20  # One list of floats kept for each request would exceed it.


def rows(kind: str, seed: int) -> list[Request]:
    """Requests like mmlu's: long prefixes that many rows share, with four choices each, or generations after them."""
    requests: list[Request] = []
    for i in range(ROWS):
        prompt = [i * PREFIXES // ROWS] * 100 + [seed, i % 997, i % 991]
        if kind == "generate":
            requests.append(GenerateRequest(i, prompt, SamplingParams(max_tokens=9)))
        else:
            requests += [ScoreRequest(4 * i + j, prompt, [j]) for j in range(4)]
    return requests


def growth(kind: str) -> float:
    """Bytes for each request that a run leaves when its outputs are gone, on an engine that has run before; the lesser
    of two runs': a leak is in both, and what comes once (19 KB were seen after other tests in the process) in one."""
    tracemalloc.start()
    try:
        engine = NullEngine(1000, 4096, 500, max_num_seqs=64, max_num_batched_tokens=2048)
        batches, traced_bytes = [rows(kind, seed) for seed in (1, 2, 3)], []
        for batch in batches:
            for _ in engine.run(batch):
                pass
            gc.collect()
            traced_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return min(after - before for before, after in pairwise(traced_bytes)) / len(batches[1])


def test_finished_requests_are_forgotten_while_others_run() -> None:
    """A run holds less and less memory, because all requests are made before its first step."""
    engine = NullEngine(1000, 4096, 500, max_num_seqs=64, max_num_batched_tokens=2048)
    requests, traced_bytes = rows("generate", 1), []
    tracemalloc.start()
    try:
        for number, _ in enumerate(engine.run(requests)):
            if number in (len(requests) // 4, len(requests) * 3 // 4):
                gc.collect()
                traced_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        engine.close()
    assert traced_bytes[1] < traced_bytes[0]


def test_scores_leave_nothing() -> None:
    assert growth("score") < MOST_BYTES_A_REQUEST


def test_generations_leave_nothing() -> None:
    assert growth("generate") < MOST_BYTES_A_REQUEST


def test_what_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a list kept for each request shows in the growth."""
    kept: list[object] = []
    finish = NullEngine._take_scores
    monkeypatch.setattr(NullEngine, "_take_scores", lambda self, result: kept.append([0.5] * 9) or finish(self, result))
    assert growth("score") > MOST_BYTES_A_REQUEST
