"""Makes `kernels/matmul_table.json`: for each shape and M every candidate schedule is run, proved equal, and timed.

A candidate whose bytes are not those of the reference schedule is dropped and reported: the table can only hold
schedules that were equal on the GPU it is for. An M at which cuBLASLt without a split of K is the quickest gets
no entry, because such an M takes cuBLASLt then. From MANY_ROWS rows on an entry serves only operands that do not suit
cuBLASLt, and GPUs on which cuBLASLt's bytes differ. The table and the report are written after every shape.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.matmul_candidates import candidates
from benchmarks.matmul_points import (
    FIXED,
    Point,
    Shape,
    cublas,
    operands,
    point_of,
    poisoned,
)
from evalengine.bench.environment import environment
from evalengine.bench.throughput import reason
from evalengine.bench.timing import compare_gpu_seconds, free_memory
from evalengine.kernels.matmul import REFERENCE, MatmulSchedule, matmul
from evalengine.kernels.matmul_schedules import BUCKETS, CUBLASLT, CUBLASLT_ROWS, by_cublaslt
from evalengine.verification.verdict import count_differing

FINALISTS = 4  # candidates that are timed again, with more repeats, in turns with cuBLAS
# For few rows "pointer" may be this much slower than "tma", which needs a tensor map for each weight.
POINTER_BONUS = 1.02
FEW_ROWS = 64
DTYPE = torch.bfloat16
Job = tuple[
    MatmulSchedule, int, bool, torch.dtype
]  # schedule, rows, whether K is a multiple of the block, output dtype


def tune(
    device: torch.device, chosen: list[Shape], out: Path, report: Path | None, budget_s: float, workers: int
) -> tuple[list[Point], list[str]]:
    """Tunes the shapes within about `budget_s` seconds (the rest stays as it was).

    Returns the points measured, and a sentence for each shape that failed, which leaves the others' rows as they are.
    """
    start = time.perf_counter()
    compile_all(chosen, workers)
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name(device)
    points: list[Point] = []
    failed: list[str] = []
    for shape in chosen:
        if (elapsed := time.perf_counter() - start) > budget_s:
            print(f"out of time: {shape} and what follows were not tuned", file=sys.stderr)
            break
        try:
            tuned = tune_shape(device, shape)
        except Exception as error:
            failed.append(f"{shape}: {reason(error)}")
            print(f"not tuned: {failed[-1]}", file=sys.stderr, flush=True)
            continue
        points += tuned
        write_table(out, name, shape, tuned)
        if report:
            write_report(points, report)
        ratios = [point.ratio for point in tuned]
        print(f"[{elapsed:4.0f} s] {shape} {' '.join(f'{ratio:.2f}' for ratio in ratios)}", file=sys.stderr, flush=True)
    return points, failed


def tune_shape(device: torch.device, shape: Shape) -> list[Point]:
    free_memory()
    rows, weight = operands(shape, max(BUCKETS), device)
    return [tune_point(shape, rows[:m], weight) for m in BUCKETS]


def tune_point(shape: Shape, x: Tensor, weight: Tensor) -> Point:
    """Times all candidates roughly, then the best few again with cuBLAS and the fixed tile."""
    m, out_dtype = len(x), shape.out_dtype

    def product(schedule: MatmulSchedule) -> Tensor:
        return matmul(x, weight.t(), out_dtype=out_dtype, schedule=schedule)

    expected = product(REFERENCE)
    equal: list[MatmulSchedule] = []
    differing: list[MatmulSchedule] = []
    own = candidates(DTYPE, m, shape.n, shape.k, True)
    for schedule in (*own, by_cublaslt(m)) if m >= CUBLASLT_ROWS else own:
        try:
            same = not count_differing(poisoned(partial(product, schedule), expected), expected)
        except Exception as error:  # It needs more shared memory or registers than this GPU has.
            print(f"{shape} M{m}: {schedule}: {reason(error)}", file=sys.stderr)
            continue
        (equal if same else differing).append(schedule)
    del expected
    rough = compare_gpu_seconds({s: partial(product, s) for s in equal or [REFERENCE]}, 0.002, (3, 12))
    ranked = sorted(rough, key=lambda s: rough[s])
    pointers = [s for s in ranked if s.form == "pointer" and m <= FEW_ROWS]
    best = dict.fromkeys([*ranked[:FINALISTS], *pointers[:1]])
    runs: dict[str, Callable[[], Tensor]] = {str(s): partial(product, s) for s in best}
    others: dict[str, Callable[[], Tensor]] = {
        "cublas": cublas(x, weight, out_dtype),
        "fixed": partial(product, FIXED),
    }
    final = compare_gpu_seconds({**runs, **others}, 0.012, (7, 60))
    handicap = POINTER_BONUS if m <= FEW_ROWS else 1
    chosen = min(runs, key=lambda text: final[text] * (handicap if text.startswith("tma") else 1))
    return point_of(shape, m, chosen, final[chosen], final, *map(str, differing))


# -- compiling beforehand ---------------------------------------------------------------------------------------------


def compile_all(chosen: Iterable[Shape], workers: int) -> None:
    """Fills Triton's cache on disk, `workers` processes at a time."""
    jobs: set[Job] = set()
    for shape in chosen:
        for m in BUCKETS:
            tried = candidates(DTYPE, m, shape.n, shape.k, True)
            for s in (*tried, REFERENCE, FIXED):
                rows = 1 if s.masks_rows(m) else s.block_m
                jobs.add((s, rows, shape.k % s.block_k == 0, shape.out_dtype))
    ordered = sorted(
        jobs, key=lambda job: job[0].block_m * job[0].block_n, reverse=True
    )  # the schedules that take longest to compile come first
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, ordered))


def _compile(job: Job) -> None:
    """Runs a small product that takes the same kernel: only divisibility by 16 and by the block enter its key."""
    schedule, m, even, out_dtype = job
    n, k = 512, schedule.block_k if even else schedule.block_k + 16
    x, weight = (torch.zeros(rows, k, dtype=DTYPE, device="cuda") for rows in (m, n))
    try:
        matmul(x, weight.t(), out_dtype=out_dtype, schedule=schedule)
    except Exception as error:  # The schedule fails again, and is left out, where it is tried.
        print(f"{schedule}: {reason(error)}", file=sys.stderr)


# -- writing ----------------------------------------------------------------------------------------------------------


def write_table(path: Path, gpu: str, shape: Shape, points: list[Point]) -> None:
    """Puts the shape's row into the table at `path`, a line a shape, by N and K."""
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows = table.setdefault(gpu, {}).setdefault("bfloat16", {})
    tiles = [point for point in points if not point.schedule.startswith(CUBLASLT)]
    rows[f"{shape.n},{shape.k}"] = {str(point.m): point.schedule for point in tiles}
    _write(path, _nested(table, 0) + "\n")


def _nested(value: dict[str, Any], depth: int) -> str:
    """JSON with a line an entry at the first three levels (GPU, dtype, shape), shapes by size."""
    if depth == 3 or not value:
        return json.dumps(value)
    indent = " " * (depth + 1)
    keys = sorted(value, key=lambda key: [int(part) for part in key.split(",")] if depth == 2 else key)
    entries = ",\n".join(f"{indent}{json.dumps(key)}: {_nested(value[key], depth + 1)}" for key in keys)
    return f"{{\n{entries}\n{' ' * depth}}}"


def write_report(points: list[Point], path: Path) -> None:
    """Writes the points, the environment, and the median and the worst ratio to cuBLAS."""
    ratios = [point.ratio for point in points]
    fixed = [point.fixed_seconds / point.cublas_seconds for point in points]
    content = {
        "environment": environment(["python", "-m", "evalengine", *sys.argv[1:]]),
        "points": len(points),
        "ratio_to_cublas": {"median": statistics.median(ratios), "worst": max(ratios)},
        "fixed_tile_to_cublas": {"median": statistics.median(fixed), "worst": max(fixed)},
        "differing": sorted({text for point in points for text in point.differing}),
        "times": [point.as_json() for point in points],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps(content, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Writes whole or not at all: a run that is killed leaves the last shape's file."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
