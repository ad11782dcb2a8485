"""The schedule that a product gets, from its text, the table or the heuristic; and the tuner that makes the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import matmul_tune
from benchmarks.arguments import MATMUL
from benchmarks.matmul import summary_lines
from benchmarks.matmul_candidates import candidates
from benchmarks.matmul_points import Shape, operands, point_of, shapes
from benchmarks.report import Timing
from evalengine.errors import ConfigError
from evalengine.kernels import matmul_schedules
from evalengine.kernels.matmul import REFERENCE, MatmulSchedule, choose, matmul
from evalengine.kernels.matmul_schedules import BUCKETS, CUBLASLT_BUCKETS, bucket, by_cublaslt, heuristic

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def all_candidates() -> set[MatmulSchedule]:
    shapes = [(1 << i, n, 1024) for i in range(14) for n in (1, 576, 2560, 4096, 24576, 151936)]
    return {s for dtype in DTYPES for shape in shapes for s in candidates(dtype, *shape, dtype != torch.float32)}


def test_schedules_as_text_and_back() -> None:
    schedules = all_candidates()
    assert len(schedules) > 60
    assert any(sum(s.columns) == s.block_n == 160 and s.columns[1] == 32 for s in schedules)
    assert MatmulSchedule.parse("cublaslt m160") == by_cublaslt(160) and str(by_cublaslt(160)) == "cublaslt m160"
    for schedule in schedules:
        assert all(part & (part - 1) == 0 for part in schedule.columns) and sum(schedule.columns) == schedule.block_n
        assert MatmulSchedule.parse(str(schedule)) == schedule
    for text in ("", "tma 128x256 w8 s3 g8", "wmma 16x16x16 w4 s3 g8", f"{REFERENCE} fast"):
        with pytest.raises(ValueError):
            MatmulSchedule.parse(text)


def test_buckets() -> None:
    """A number of rows belongs to the smallest bucket that holds it, or to the largest."""
    assert [bucket(m) for m in (0, 1, 2, 3, 4, 5, 33, 127, 128, 129, 200, 8191, 8193, 10**6)] == [
        1, 1, 2, 4, 4, 8, 48, 128, 128, 160, 224, 8192, 8192, 8192,
    ]  # fmt: skip
    assert [bucket(m, CUBLASLT_BUCKETS) for m in (0, 33, 200, 257, 321, 1023, 1025, 8191, 8193)] == [
        1, 48, 224, 320, 384, 1024, 1152, 8192, 8192,
    ]  # fmt: skip
    assert {*BUCKETS} < {*CUBLASLT_BUCKETS} and [*CUBLASLT_BUCKETS] == sorted({*CUBLASLT_BUCKETS})


@pytest.fixture
def fresh_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    row = {"1": "pointer 16x16x256 w4 s4 g8", "64": "tma 64x64x64 w4 s3 g8", "2048": "tma 128x128x64 w4 s3 g8"}
    table = {"GPU X": {"bfloat16": {"1024,512": row}}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(matmul_schedules, "TABLE", path)
    cached = (matmul_schedules.preferred, matmul_schedules._choose, matmul_schedules._table, matmul_schedules._tuned)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("fresh_table")
def test_cublaslt_serves_what_was_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt serves numbers of rows and shapes without a tuned tile, unless its bucket is excluded."""
    bf16, tuned = torch.bfloat16, MatmulSchedule("tma", 64, 64, 64, 4, 3)

    def chosen(m: int, n: int, dtype: torch.dtype = bf16, gpu: str = "GPU X") -> MatmulSchedule:
        return choose(gpu, dtype, m, n, 512, True, True)

    assert chosen(64, 1024) == tuned
    for m, rows in ((32, 32), (33, 48), (65, 80), (129, 160), (2400, 2432), (9000, 8192)):
        assert chosen(m, 1024) == chosen(m, 4096) == chosen(m, 4096, gpu="GPU Y") == by_cublaslt(rows)
    assert chosen(50, 1024) == chosen(64, 1024), "all numbers of a tile's bucket"
    assert chosen(16, 1024) == tuned  # the nearest tuned bucket by ratio
    assert chosen(2000, 1024) == by_cublaslt(2048), "with many rows it precedes a tuned tile"
    assert choose("GPU X", bf16, 2000, 1024, 512, True, False) == MatmulSchedule("tma", 128, 128, 64, 4, 3)
    assert chosen(64, 4096, torch.float32) == heuristic(torch.float32, 64, 4096, 512, True)
    monkeypatch.setattr(matmul_schedules, "excluded", {by_cublaslt(48)})
    assert chosen(33, 1024) == tuned, "it differed here: the tile goes"
    monkeypatch.setattr(matmul_schedules, "excluded", {by_cublaslt(48), tuned})
    assert chosen(33, 1024) == REFERENCE


@pytest.mark.usefixtures("fresh_table")
def test_choice_takes_the_row_the_nearest_row_or_the_heuristic() -> None:
    bf16, tuned = torch.bfloat16, MatmulSchedule("tma", 64, 64, 64, 4, 3)
    assert choose("GPU X", bf16, 1, 1024, 512, True) == MatmulSchedule("pointer", 16, 16, 256, 4, 4)
    assert choose("GPU X", torch.float16, 33, 1024, 512, True) == tuned
    assert choose("GPU X", bf16, 32, 1024, 512, True) == tuned, "the next larger bucket"
    assert choose("GPU X", bf16, 128, 1024, 512, True) == tuned, "64 rows are nearer than 2048"
    assert choose("GPU X", bf16, 5000, 1024, 512, True) == MatmulSchedule(
        "tma", 128, 128, 64, 4, 3
    )  # the largest bucket that was tuned
    assert choose("GPU X", bf16, 64, 4096, 4096, True) == tuned  # the table's nearest shape
    for other in (choose("GPU X", bf16, 64, 1024, 512, False), choose("GPU Y", bf16, 64, 1024, 512, False)):
        assert other == heuristic(bf16, 64, 1024, 512, False)  # unfit for descriptors; an unknown GPU
    assert choose("GPU X", torch.float32, 1, 1024, 512, True) == heuristic(torch.float32, 1, 1024, 512, True)


def test_the_heuristic_fits_every_gpu_and_shape() -> None:
    """The heuristic's tiles fit into shared memory, and need descriptors only where they are allowed."""
    for dtype in DTYPES:
        size = dtype.itemsize
        for m in (1, 17, 33, 65, 129, 300, 8192):
            for n, k in ((1, 1), (576, 1536), (4096, 4096), (151936, 1024)):
                for tma_ok in (False, dtype != torch.float32):
                    s = heuristic(dtype, bucket(m), n, k, tma_ok)
                    assert tma_ok or s.form == "pointer"
                    bytes_needed = (s.block_m + s.block_n) * s.block_k * size * s.num_stages
                    assert bytes_needed <= (227 if s.form == "tma" else 96) << 10, s


def test_the_committed_table_is_sound() -> None:
    """Every schedule of the shipped table is one of the tuner's candidates for its bucket."""
    for gpu in json.loads(matmul_schedules.TABLE.read_text()):
        for (n, k), row in matmul_schedules._tuned(gpu).items():
            assert n > 0 and k > 0 and set(row) <= set(BUCKETS)
            for m, schedule in row.items():
                assert schedule in candidates(torch.bfloat16, m, n, k, True), (n, k, m, str(schedule))


def test_candidates_are_few_and_distinct() -> None:
    for m in (1, 16, 32, 64, 128, 256, 8192):
        for n in (576, 4096, 151936):
            schedules = candidates(torch.bfloat16, m, n, 1024, True)
            assert 5 <= len(schedules) <= 19 and len(schedules) == len(set(schedules))
            assert all(replace(s, form="pointer") == s for s in candidates(torch.bfloat16, m, n, 1024, False))


# -- the tuner --------------------------------------------------------------------------------------------------------


def test_shapes_of_the_models() -> None:
    """The tuned shapes are those of the benched models' layers, each once."""
    sizes = {(s.n, s.k): s for s in shapes()}
    assert len(sizes) == len(shapes()) == 32
    assert sizes[6144, 4096].names == ("Qwen3-8B qkv_proj", "Llama-3.1-8B qkv_proj") and not sizes[6144, 4096].lm_head
    assert sizes[49152, 576].out_dtype == torch.float32


def test_the_table_is_extended_shape_by_shape(tmp_path: Path) -> None:
    """`write_table` keeps other GPUs and shapes, sorts shapes, and writes a line for each."""
    small, large = (Shape(n, 64, False, ("x",)) for n in (96, 1024))
    path = tmp_path / "table.json"
    path.write_text("{}\n")
    for shape, gpu in ((large, "GPU B"), (large, "GPU A"), (small, "GPU A"), (small, "GPU A")):
        points = [point_of(shape, m, str(REFERENCE), 1.0, {"cublas": 2.0, "fixed": 3.0}) for m in (1, 2)]
        matmul_tune.write_table(path, gpu, shape, points)
    row = {"1": str(REFERENCE), "2": str(REFERENCE)}
    rows = {"96,64": row, "1024,64": row}
    assert json.loads(path.read_text()) == {"GPU A": {"bfloat16": rows}, "GPU B": {"bfloat16": {"1024,64": row}}}
    assert path.read_text().index('"96,64"') < path.read_text().index('"1024,64"')
    assert sum(line.startswith('   "') for line in path.read_text().splitlines()) == 3  # a line per shape
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_the_summary_names_the_median_and_the_worst() -> None:
    shape = Shape(96, 64, False, ("x",))
    points = [point_of(shape, m, "", 1.0 + m / 10, {"cublas": 1.0, "fixed": 5.0 - m}) for m in (1, 2, 4)]
    median, fixed_median, worst, fixed_worst = summary_lines(points)
    assert isinstance(median, Timing) and isinstance(fixed_median, Timing)
    assert isinstance(worst, Timing) and isinstance(fixed_worst, Timing)
    assert (round(median.ratio, 6), round(worst.ratio, 6)) == (1.2, 1.4) and median.passed is worst.passed is False
    assert (fixed_median.ratio, fixed_worst.ratio, fixed_worst.passed) == (3.0, 4.0, None)
    assert worst.case.endswith("N96 K64 M4") and fixed_worst.case.endswith("N96 K64 M1")


@pytest.mark.gpu
def test_tuning_finds_equal_schedules_and_writes_what_choose_reads(tmp_path: Path) -> None:
    table, report = tmp_path / "table.json", tmp_path / "report.json"
    arguments = ["--tune", "--shapes", "576,576", "--out", str(table), "--report", str(report), "--workers", "4"]
    assert MATMUL(arguments) == 0
    (rows,) = json.loads(table.read_text()).values()
    for m, text in rows["bfloat16"]["576,576"].items():
        assert MatmulSchedule.parse(text) in candidates(torch.bfloat16, int(m), 576, 576, True)
    tuning_report = json.loads(report.read_text())
    assert tuning_report["differing"] == [] and len(tuning_report["times"]) == len(BUCKETS)
    by_tiles = [str(time["m"]) for time in tuning_report["times"] if not time["schedule"].startswith("cublaslt")]
    assert list(rows["bfloat16"]["576,576"]) == by_tiles  # the table omits rows that cuBLASLt serves
    for time in tuning_report["times"]:
        assert 0 < time["floor_seconds"] < time["seconds"] < 0.01


@pytest.mark.gpu
def test_a_schedule_with_other_bytes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner drops every schedule whose product is wrong: here, all pointer schedules but the reference."""

    def broken(*arguments: Tensor, schedule: MatmulSchedule, **options: torch.dtype) -> Tensor:
        product = matmul(*arguments, schedule=schedule, **options)
        return product if schedule == REFERENCE or schedule.form != "pointer" else product + 1

    monkeypatch.setattr(matmul_tune, "matmul", broken)
    (shape,) = (s for s in shapes() if (s.n, s.k) == (576, 576))
    x, weight = operands(shape, 64, torch.device(DEVICE))
    point = matmul_tune.tune_point(shape, x, weight)
    assert not point.schedule.startswith("pointer") and point.differing
    assert all(text.startswith("pointer") for text in point.differing)


def test_no_gpu_or_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="no shape"):
        MATMUL(["--shapes", "1,1"])
    if DEVICE == "cpu":
        with pytest.raises(ConfigError, match="CUDA"):
            MATMUL(["--tune"])
