"""Linear layers' products, compared with cuBLAS (default settings) and with the one tile of the published libraries.

    M rows (tokens), K input features, N output features.

The shapes are those of seven models, projections merged as the engine merges them. Inputs are random bf16; cuBLAS is
`torch.mm`. Weights come from memory, not from L2: every repeat starts cold.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import matmul_tune
from benchmarks.matmul_points import FIXED, Point, Shape, cublas, operands, point_of, poisoned, shapes
from benchmarks.measure import WrongResult, guarded, host_seconds
from benchmarks.models import PRODUCTS_OF
from benchmarks.report import Failure, Line, Timing
from evalengine.bench.timing import compare_gpu_seconds, free_memory
from evalengine.errors import ConfigError
from evalengine.kernels.matmul import REFERENCE, MatmulSchedule, linear, matmul, schedule_for
from evalengine.kernels.matmul_schedules import BUCKETS, TABLE
from evalengine.util.command import Namespace
from evalengine.verification.verdict import count_differing

MEDIAN_TARGET, WORST_TARGET = 1.02, 1.20  # our time over cuBLAS's, at most


def measure_points(device: torch.device, chosen: Iterable[Shape], budget_s: float = 0.012) -> Iterator[Point]:
    """Checks the schedule that `choose` picks for each shape and M byte by byte against the reference, and times it."""
    for shape in chosen:
        free_memory()
        all_rows, weight = operands(shape, max(BUCKETS), device)
        for m in BUCKETS:
            x, out_dtype = all_rows[:m], shape.out_dtype
            ours = partial(linear, x, weight, out_dtype=out_dtype)
            expected = matmul(x, weight.t(), out_dtype=out_dtype, schedule=REFERENCE)
            if count_differing(poisoned(ours, expected), expected):
                raise WrongResult(f"{shape} M{m}: other bytes than the reference schedule's")
            fixed = partial(matmul, x, weight.t(), out_dtype=out_dtype, schedule=FIXED)
            runs: dict[str, Callable[[], Tensor]] = {
                "ours": ours,
                "cublas": cublas(x, weight, out_dtype),
                "fixed": fixed,
            }
            seconds = compare_gpu_seconds(runs, budget_s, (7, 60))
            schedule = str(schedule_for(x, weight.t(), out_dtype))
            yield point_of(shape, m, schedule, seconds["ours"], seconds)


def measure(device: torch.device, explanations: dict[str, Any]) -> Iterator[Line]:
    """The median and the worst ratio to cuBLAS, and the fixed tile's; every point goes into `explanations`."""
    points: list[Point] = []
    for shape in shapes():
        yield from guarded("matmul", str(shape), partial(_collect, points, device, shape))
    explanations["matmul: every point"] = [point.as_json() for point in points]
    explanations["matmul: seconds until a call returns"] = launch_seconds(device)
    yield from summary_lines(points)


def launch_seconds(device: torch.device) -> dict[str, float]:
    """The host's seconds for one product, by ours (a pointer and a descriptor schedule) and by torch."""
    x, weight = operands(Shape(1024, 1024, False, ()), 64, device)
    runs: dict[str, Callable[[], Tensor]] = {
        "linear, M = 1": partial(linear, x[:1], weight),
        "tma schedule, M = 64": partial(matmul, x, weight.t(), schedule=MatmulSchedule("tma", 64, 64, 64)),
        "torch.mm, M = 64": cublas(x, weight, x.dtype),
    }
    return {name: host_seconds(run) for name, run in runs.items()}


def _collect(points: list[Point], device: torch.device, shape: Shape) -> list[Line]:
    points += measure_points(device, [shape])
    return []


def summary_lines(points: list[Point]) -> list[Line]:
    """The points with the median and the worst ratio to cuBLAS, ours and the fixed tile's."""
    if not points:
        return [Failure("matmul", "all shapes", "no point was measured", wrong=False)]
    ordered = sorted(points, key=lambda point: point.ratio)
    fixed = sorted(points, key=lambda point: point.fixed_seconds / point.cublas_seconds)
    middle, last = (len(points) - 1) // 2, len(points) - 1
    lines: list[Line] = []
    for label, rank, target in (("median", middle, MEDIAN_TARGET), ("worst", last, WORST_TARGET)):
        for what, point, limit in (("matmul", ordered[rank], target), ("fixed 128x128x64 tile", fixed[rank], None)):
            seconds = point.seconds if what == "matmul" else point.fixed_seconds
            case = f"{label} of {len(points)}: N{point.n} K{point.k} M{point.m}"
            lines.append(Timing(what, case, seconds, "cuBLAS", point.cublas_seconds, "time", limit))
    return lines


def print_points(points: list[Point]) -> None:
    """Prints our time over cuBLAS's: a row for each shape, a column for each M."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="matmul: our time / cuBLAS's", caption="* lm_head, float32 out")
    for column in ("N x K", *(str(m) for m in BUCKETS)):
        table.add_column(column, justify="right")
    rows: dict[tuple[int, int, str], dict[int, float]] = {}
    for point in points:
        rows.setdefault((point.n, point.k, point.out_dtype), {})[point.m] = point.ratio
    for (n, k, dtype), ratios in rows.items():
        mark = "*" if dtype == "float32" else ""
        table.add_row(f"{n} x {k}{mark}", *(f"{ratios[m]:.2f}" if m in ratios else "" for m in BUCKETS))
    Console(width=max(120, Console().width)).print(table)
    ratios_all = [point.ratio for point in points]
    fixed = [point.fixed_seconds / point.cublas_seconds for point in points]
    print(f"{len(points)} points. Ours: median {statistics.median(ratios_all):.3f}, worst {max(ratios_all):.3f}; "
          f"fixed tile: median {statistics.median(fixed):.3f}, worst {max(fixed):.3f}.")  # fmt: skip


def main(arguments: Namespace) -> int:
    """`benchmarks matmul [--tune]`: 0 done, 1 a schedule gave other bytes or a shape could not be tuned.

    Raises ConfigError for unknown shapes or without a GPU.
    """
    all_shapes = shapes(arguments.ranks)
    chosen = [shape for shape in all_shapes if not arguments.shapes or _selected(shape, arguments.shapes.split(";"))]
    if not chosen:
        raise ConfigError(f"--shapes {arguments.shapes}: no shape of {', '.join(PRODUCTS_OF)} is meant")
    if not torch.cuda.is_available():
        raise ConfigError("the benchmarks measure a CUDA device, and this machine has none that can be used.")
    device = torch.device("cuda", torch.cuda.current_device())
    failed: list[str] = []
    if arguments.tune:
        points, failed = matmul_tune.tune(
            device, chosen, arguments.out or TABLE, arguments.report, arguments.budget_s, arguments.workers
        )
    else:
        points = list(measure_points(device, chosen))
        if arguments.report:
            matmul_tune.write_report(points, arguments.report)
    if points:
        print_points(points)
    for text in failed:
        print(f"not tuned: {text}", file=sys.stderr)
    wrong = sorted({(f"N{p.n} K{p.k} M{p.m}", text) for p in points for text in p.differing})
    for where, text in wrong:
        print(f"other bytes than the reference: {where}: {text}", file=sys.stderr)
    return 1 if wrong or failed else 0


def _selected(shape: Shape, words: list[str]) -> bool:
    return any(word == f"{shape.n},{shape.k}" or any(word in name for name in shape.names) for word in words)
