"""`python -m benchmarks host`: how long the host takes for whole runs, on this machine's CPU."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, readable
from evalengine.util.command import Namespace

COLUMNS = ("workload", "requests", "steps", "launched ahead", "computed tokens", "new tokens", "host s", "us a request")
IN_CODE = ("random", "gsm8k_cot")
MAX_MODEL_LEN, NUM_KV_BLOCKS, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 4096, 20_000, 256, 8192

COUNTERS = ("steps", "steps_ahead", "computed_tokens", "generated_tokens")  # reported fields of `EngineStats`

Row = dict[str, Any]


def main(arguments: Namespace) -> int:
    """Runs `benchmarks host` with its words; returns the exit code."""
    from evalengine.bench.environment import environment
    from evalengine.bench.workload_files import workload_files

    with readable(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    files = workload_files(arguments.files) if arguments.files else {}
    chosen = arguments.workloads or [*IN_CODE, *files]
    if unknown := [name for name in chosen if name not in (*IN_CODE, *files)]:
        raise ConfigError(f"--workloads {unknown[0]}: there are {', '.join((*IN_CODE, *files))}")
    rows = []
    for name in chosen:
        rows.append(measure(name, files, arguments.requests, arguments.rounds))
        print(f"bench: {name}, {rows[-1]['host_s']:.3f} s", file=sys.stderr, flush=True)
    about = environment(["python", "-m", "benchmarks", "host"])
    _write(rows, about, arguments.output)
    print("\n".join(_table(rows)))
    return 0


def measure(name: str, files: Mapping[str, Path], requests: int | None, rounds: int) -> Row:
    """The quickest of some runs of a workload, each from an empty prefix cache, by the processor's time."""
    from benchmarks.null_engine import NullEngine
    from evalengine.bench.workloads import VOCAB_SIZE, make_workload

    workload = make_workload(name, files, "null", VOCAB_SIZE, MAX_MODEL_LEN, requests)
    settings = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    best: Row = {}
    with NullEngine(VOCAB_SIZE, MAX_MODEL_LEN, NUM_KV_BLOCKS, **settings) as engine:
        for _ in range(rounds + 1):  # The first round warms up: it meets every size of a graph.
            engine.reset_prefix_cache()
            gc.collect()
            before, started = asdict(engine.stats), time.process_time()
            requests_run = sum(1 for _ in engine.run(workload.requests))
            seconds, after = time.process_time() - started, asdict(engine.stats)
            row = {"workload": name, "requests": requests_run, "host_s": seconds}
            row |= {key: after[f"num_{key}"] - before[f"num_{key}"] for key in COUNTERS}
            best = row if not best or seconds < best["host_s"] else best
    return best


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)]]
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("requests", *COUNTERS)]
        lines.append([row["workload"], *counts, f"{row['host_s']:.3f}", f"{row['host_s'] / row['requests'] * 1e6:.0f}"])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _write(rows: Sequence[Row], about: Mapping[str, Any], folder: Path) -> None:
    from benchmarks.report import write_page
    from evalengine.bench.environment import slug

    content = {"environment": {**about, "gpu": None}, "rows": list(rows)}
    method = (
        f"`{about['command']}`, {about['date']}, commit {about['code']['commit']}; over a model that computes nothing."
    )
    title = f"The host's share of whole runs, on {about['cpu']}"
    write_page(folder, f"host-{slug(about['cpu'])}", content, title, method, _table(rows))
