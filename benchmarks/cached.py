"""`python -m benchmarks cache`: how long a run takes if every answer is in the cache."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.whole_run import planned, timed, without_places
from evalengine.errors import EvalEngineError
from evalengine.records.evidence import AGAIN
from evalengine.records.manifest_data import MANIFEST, load_manifest
from evalengine.util.command import Namespace

COLUMNS = ("requests", "to the digest, s", "whole command, s", "CPU, s", "load on the machine before")


def main(arguments: Namespace) -> int:
    """Runs `benchmarks cache` with its words; returns the exit code."""
    from evalengine.bench.environment import environment

    with tempfile.TemporaryDirectory(prefix="evalengine-bench-") as scratch:
        cache, output = Path(scratch) / "cache", Path(scratch) / "out"
        settings = [*arguments.settings, f"cache={cache}", "progress=false", "resume=never"]
        requests = _fill(settings)
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(_timed([*settings, f"output_dir={output / str(number)}"], output / str(number), requests))
            print(f"bench: {rounds[-1]}", file=sys.stderr, flush=True)
    command = ["python", "-m", "benchmarks", "cache", *without_places(arguments.settings)]
    about = environment(command)
    _write(requests, rounds, about, arguments.output)
    print("\n".join(_table(requests, rounds)))
    return 0


def _fill(settings: Sequence[str]) -> int:
    """Makes up an answer to every request that the run will have, a generation's being one token that ends it; returns
    how many there are."""
    import numpy as np

    from evalengine.cache.engine import through_cache
    from evalengine.cache.store import Row
    from evalengine.engine.request import GenerateRequest
    from evalengine.harness.identity import identify
    from evalengine.records.schema import Answer

    config, plan, llm = planned(settings)
    datasets = {own.task.name: own.task.fingerprint(config.limit) for own in plan.tasks}
    identity = identify(config, llm, plan.prompts_sha256, datasets)
    with through_cache(config, llm, identity, str) as cached:
        assert cached is not None
        entries = []
        for item in plan.requests:
            request, number = item.request, item.request.request_id
            generates = isinstance(request, GenerateRequest)
            ids = [llm.spec.eos_token_ids[0]] if isinstance(request, GenerateRequest) else request.continuation_ids
            logprobs = np.full(len(ids), -1 - number % 7 / 8, dtype=np.float32)
            answer = Answer(ids, logprobs, "stop" if generates else "length", "", False)
            entries.append((cached.keys.of(request), Row.of(answer, not generates)))
        cached.store.put({**cached.keys.facts, "name": "made up"}, entries)
    return len(entries)


def _timed(settings: Sequence[str], output: Path, requests: int) -> dict[str, Any]:
    """One run in its own process. Raises EvalEngineError if it fails, or computes anything."""
    run = timed("benchmarks cache", ["-m", "evalengine", *settings])
    (folder,) = output.glob("*-*")
    cache = load_manifest(folder / MANIFEST, AGAIN).cache
    hits = 0 if cache is None else cache.hits
    if hits != requests:
        raise EvalEngineError(f"benchmarks cache: {hits} hits of {requests} requests: not all were in the cache")
    return {
        "to_digest_s": round((folder / "digest.txt").stat().st_mtime - run.started, 2),
        "whole_s": round(run.seconds, 2),
        "cpu_s": round(run.cpu_seconds, 2),
        "load_before": round(run.load_before, 2),
    }


def _table(requests: int, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    names = ("to_digest_s", "whole_s", "cpu_s", "load_before")
    middle = [f"{median(timed[name] for timed in rounds):.1f}" for name in names]
    lines = [list(COLUMNS), ["---:"] * len(COLUMNS), [f"{requests:,}", *middle]]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _write(requests: int, rounds: Sequence[Mapping[str, Any]], about: Mapping[str, Any], folder: Path) -> None:
    from benchmarks.report import write_page
    from evalengine.bench.environment import slug

    content = {"environment": {**about, "gpu": None}, "requests": requests, "rounds": list(rounds)}
    title = f"A run out of the cache, on {about['cpu']}, {os.cpu_count()} cores"
    method = (
        f"`{about['command']}`, {about['date']}, commit {about['code']['commit']}. The answers are made up; timed is a "
        f"whole process, median of {len(rounds)} runs: imports, rows, prompts, the cache, results, digest, page."
    )
    write_page(folder, f"cache-{slug(about['cpu'])}", content, title, method, _table(requests, rounds))
