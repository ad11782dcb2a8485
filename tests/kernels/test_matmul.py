"""`native` products: values against float64, bytes under every schedule, and whatever strides torch hands over.

On the CPU the interpreter multiplies with numpy, whose order of summation follows the tile: there, bytes are compared
between equal tiles only; across schedules they are compared on the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evalengine.bench import matmul_tune
from evalengine.bench.matmul import Shape, main, operands, point, shapes, summary_lines
from evalengine.bench.report import Comparison
from evalengine.errors import ConfigError
from evalengine.kernels import matmul_schedules, reference
from evalengine.kernels.matmul import REFERENCE, Schedule, bmm, choose, linear, matmul
from evalengine.kernels.matmul_candidates import candidates
from evalengine.kernels.matmul_schedules import bucket, heuristic
from tests.bitwise import assert_bitwise_equal, count_differing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's bf16 is wrong
DTYPES = [torch.float32, torch.float16, BF16]
HALVES = [torch.float16, BF16]
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # the largest relative error of a rounding

POINTERS = [
    Schedule("pointer", 16, 32, 16),
    Schedule("pointer", 32, 16, 32, group_m=2),
    Schedule("pointer", 16, 64, 32, swap=True),
]
DESCRIPTORS = [
    Schedule("tma", 16, 32, 32),
    Schedule("tma", 64, 64, 16, persistent=True, group_m=2),
    Schedule("tma", 16, 64, 32, swap=True),
    Schedule("tma", 64, 64, 16, num_warps=8, persistent=True, subtiles=2),
    Schedule("tma", 32, 64, 16, swap=True, persistent=True, subtiles=2),
    Schedule("tma", 16, 48, 32),  # 32 + 16 columns
    Schedule("tma", 64, 80, 16, persistent=True, group_m=2, subtiles=2),
]
SHAPES = [(1, 1, 1), (5, 7, 3), (17, 65, 33), (31, 1, 40), (1, 67, 129)]  # M, N, K
ALIGNED = [(1, 8, 8), (17, 72, 40), (67, 136, 72)]  # rows of 16 bytes: what a descriptor may address


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(actual: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """Within one rounding of the output's dtype, and of the float32 chain: K steps of 2^-23 of the magnitudes."""
    wide = (a.cpu().double(), b.cpu().double())
    added = 0 if bias is None else bias.cpu().double()
    truth = wide[0] @ wide[1] + added
    magnitudes = wide[0].abs() @ wide[1].abs() + abs(added)
    allowed = UNIT[actual.dtype] * truth.abs() + (a.shape[-1] + 2) * 2**-23 * magnitudes + 2**-25
    error = (actual.cpu().double() - truth).abs()
    assert bool((error <= allowed).all()), f"{(error / allowed).max():.2f} times what roundings allow"


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", [*POINTERS, REFERENCE, None], ids=str)
def test_pointer_forms_are_float64_rounded(schedule: Schedule | None, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        a, b, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1).t(), random(n, dtype=dtype, seed=2)
        assert_close(matmul(a, b, schedule=schedule), a, b)
        wide = matmul(a, b, bias, out_dtype=torch.float32, schedule=schedule)
        assert wide.dtype == torch.float32
        assert_close(wide, a, b, bias)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("schedule", DESCRIPTORS, ids=str)
def test_descriptor_forms_are_float64_rounded(schedule: Schedule, dtype: torch.dtype) -> None:
    for m, n, k in ALIGNED:
        a, b, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1).t(), random(n, dtype=dtype, seed=2)
        assert_close(matmul(a, b, bias, schedule=schedule), a, b, bias)
        assert_close(matmul(a, b, out_dtype=torch.float32, schedule=schedule), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_after_the_bias_unless_asked(dtype: torch.dtype) -> None:
    a, b, bias = random(33, 48, dtype=dtype), random(48, 72, dtype=dtype), random(72, dtype=dtype, seed=2)
    schedules = [*POINTERS, *([] if dtype == torch.float32 else DESCRIPTORS)]
    columns = b.t().contiguous().t()  # contiguous along K, for the descriptors
    twice = 0
    for schedule in schedules:
        chain = matmul(a, columns, out_dtype=torch.float32, schedule=schedule)
        once = matmul(a, columns, bias, schedule=schedule)
        assert_bitwise_equal(once, (chain + bias.float()).to(dtype))
        rounded = matmul(a, columns, bias, round_product=True, schedule=schedule)
        product = matmul(a, columns, schedule=schedule)
        assert_bitwise_equal(product, chain.to(dtype))
        assert_bitwise_equal(rounded, (product.float() + bias.float()).to(dtype))
        twice += count_differing(once, rounded)
    assert (twice > 0) == (dtype != torch.float32)


def test_reference_agrees() -> None:
    x, weight, bias = (
        random(3, 5, dtype=torch.float32),
        random(7, 5, dtype=torch.float32),
        random(7, dtype=torch.float32),
    )
    assert_close(linear(x, weight, bias), x, weight.t(), bias)
    torch.testing.assert_close(linear(x, weight, bias).double(), reference.linear(x, weight, bias), rtol=0, atol=1e-5)


# -- what torch hands over --------------------------------------------------------------------------------------------


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Views that equal x [R, C], each laid out in another way, in storage that is NaN wherever x is not."""
    rows, columns = x.shape
    yield x
    yield x.t().contiguous().t()
    wide = x.new_full((rows + 2, columns + 8), torch.nan)
    wide[1:-1, 3:-5] = x
    yield wide[1:-1, 3:-5]
    every_other = x.new_full((2 * rows, 3 * columns), torch.nan)
    every_other[::2, 1::3] = x
    yield every_other[::2, 1::3]
    tall = x.new_full((columns + 3, rows + 5), torch.nan)
    tall[2:-1, 1:-4] = x.t()
    yield tall[2:-1, 1:-4].t()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_and_neighbours_change_nothing(dtype: torch.dtype) -> None:
    a, b = random(19, 37, dtype=dtype), random(37, 21, dtype=dtype, seed=1)
    for schedule in POINTERS:
        expected = matmul(a, b, schedule=schedule)
        for left, right in [*((x, b) for x in layouts(a)), *((a, x) for x in layouts(b))]:
            assert_bitwise_equal(matmul(left, right, schedule=schedule), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_descriptors_read_nothing_outside(dtype: torch.dtype) -> None:
    stored_a, stored_b = torch.full((24, 64), torch.nan), torch.full((80, 64), torch.nan)
    a, b = stored_a.to(DEVICE, dtype)[2:21, 8:48], stored_b.to(DEVICE, dtype)[1:73, 16:56]
    a.copy_(random(19, 40, dtype=dtype)), b.copy_(random(72, 40, dtype=dtype, seed=1))
    for schedule in DESCRIPTORS:
        expected = matmul(a.contiguous(), b.contiguous().t(), schedule=schedule)
        assert bool(expected.isfinite().all())
        assert_bitwise_equal(matmul(a, b.t(), schedule=schedule), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tail_of_k_counts_as_zeros(dtype: torch.dtype) -> None:
    a, b = random(9, 40, dtype=dtype), random(16, 40, dtype=dtype, seed=1)
    padded = [torch.nn.functional.pad(x, (0, 24)) for x in (a, b)]
    for schedule in [*POINTERS, *([] if dtype == torch.float32 else DESCRIPTORS)]:
        expected = matmul(padded[0], padded[1].t(), schedule=schedule)
        assert_bitwise_equal(matmul(a, b.t(), schedule=schedule), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bmm_is_matmul_entry_by_entry(dtype: torch.dtype) -> None:
    a, b = random(3, 19, 33, dtype=dtype), random(3, 33, 17, dtype=dtype, seed=1)
    views = [(a, b), (a.transpose(1, 2).contiguous().transpose(1, 2), b), (a, b[1].expand(3, -1, -1))]
    views += [(a[:1].expand(3, -1, -1), b.transpose(0, 1).contiguous().transpose(0, 1)), (a[:0], b[:0])]
    for schedule in (POINTERS[0], POINTERS[2]):
        for left, right in views:
            expected = [matmul(x, y, schedule=schedule) for x, y in zip(left, right, strict=True)]
            actual = bmm(left, right, schedule=schedule)
            assert_bitwise_equal(actual, torch.stack(expected) if expected else a.new_empty(0, 19, 17))
    assert bmm(a, b, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_matmul_by_the_transpose(dtype: torch.dtype) -> None:
    x, weight, bias = random(5, 24, dtype=dtype), random(40, 24, dtype=dtype, seed=1), random(80, dtype=dtype)[::2]
    assert_bitwise_equal(linear(x, weight, bias), matmul(x, weight.t(), bias))
    wide = linear(x, weight, out_dtype=torch.float32)
    assert_bitwise_equal(wide, matmul(x, weight.t(), out_dtype=torch.float32))
    assert_bitwise_equal(wide.to(dtype), linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(dtype: torch.dtype) -> None:
    bias = random(4, dtype=dtype)
    assert matmul(random(0, 3, dtype=dtype), random(3, 4, dtype=dtype), bias).shape == (0, 4)
    assert matmul(random(2, 3, dtype=dtype), random(3, 0, dtype=dtype)).shape == (2, 0)
    nothing = random(2, 0, dtype=dtype), random(0, 4, dtype=dtype)
    assert_bitwise_equal(matmul(*nothing), bias.new_zeros(2, 4))
    assert_bitwise_equal(matmul(*nothing, bias), bias.expand(2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_negative_zeros_are_positive(dtype: torch.dtype) -> None:
    zeros, weight = torch.zeros(3, 24, dtype=dtype, device=DEVICE), -random(8, 24, dtype=dtype).abs()
    for schedule in [*POINTERS, *([] if dtype == torch.float32 else DESCRIPTORS)]:
        assert_bitwise_equal(matmul(zeros, weight.t(), schedule=schedule), zeros.new_zeros(3, 8))


def test_what_does_not_fit_is_refused() -> None:
    a, b = random(3, 5, dtype=torch.float32), random(5, 7, dtype=torch.float32)
    tma = DESCRIPTORS[0]
    for call in (
        lambda: matmul(a, b.t()),
        lambda: matmul(a, b.half()),
        lambda: matmul(a.double(), b.double()),
        lambda: matmul(a, b, random(5, dtype=torch.float32)),
        lambda: matmul(a, b, schedule=tma),  # float32
        lambda: matmul(a.half(), b.half(), schedule=tma),  # rows of 10 bytes
        lambda: bmm(a[None], b[None].expand(2, -1, -1)),
        lambda: bmm(a[None], b[None], schedule=tma),
    ):
        with pytest.raises(ValueError):
            call()


# -- a row's bits are its own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_and_anywhere(dtype: torch.dtype) -> None:
    a, weight = random(35, 72, dtype=dtype), random(48, 72, dtype=dtype, seed=1)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for schedule in [*POINTERS, *([] if dtype == torch.float32 else DESCRIPTORS)]:
        together = matmul(a, weight.t(), schedule=schedule)
        assert_bitwise_equal(matmul(a[order], weight.t(), schedule=schedule), together[order])
        for row in (0, 16, 34):
            assert_bitwise_equal(matmul(a[row : row + 1], weight.t(), schedule=schedule), together[row : row + 1])


EVERY_SHAPE = [(1024, 3072), (2560, 1536), (4096, 1000), (24576, 512), (67, 131), (1, 4099)]  # N, K


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(1, 2, 7, 16), (17, 64), (127, 129), (512, 1025)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [(torch.bfloat16, *shape) for shape in EVERY_SHAPE]
    + [(dtype, *shape) for dtype in (torch.float16, torch.float32) for shape in EVERY_SHAPE[2::2]],
)
def test_every_schedule_gives_the_same_bytes(n: int, k: int, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Of the float32 chains, before any rounding could hide a difference."""
    weight, bias = random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    x = random(1025, k, dtype=dtype)
    expected = matmul(x, weight.t(), bias, out_dtype=torch.float32, schedule=REFERENCE)
    tma_ok = dtype != torch.float32 and n % 8 == k % 8 == 0 and torch.cuda.get_device_capability()[0] in (9, 10)
    tried = set()
    for m in rows:
        for schedule in candidates(dtype, m, n, k, tma_ok):
            actual = matmul(x[:m], weight.t(), bias, out_dtype=torch.float32, schedule=schedule)
            assert_bitwise_equal(actual, expected[:m])
            tried.add(schedule)
        for _ in range(2):  # the second call takes what the first has found out
            assert_bitwise_equal(linear(x[:m], weight, bias, out_dtype=torch.float32), expected[:m])
    assert len(tried) >= (5 if tma_ok else 2)


@pytest.mark.gpu
def test_the_float32_chain_is_a_loop_of_fused_multiply_adds() -> None:
    a, b = random(4, 300, dtype=torch.float32), random(300, 5, dtype=torch.float32, seed=1)
    left, right = a.cpu().double(), b.cpu().double()
    chain = torch.zeros(4, 5, dtype=torch.float64)
    for step in range(300):  # a product of two float32 is exact in float64; its sum with a float32 nearly always is
        chain = (chain + left[:, step, None] * right[step]).float().double()
    assert_bitwise_equal(matmul(a, b), chain.float().to(DEVICE))


@pytest.mark.gpu
def test_inverse_cublas_changes_bits_with_the_number_of_rows() -> None:
    """Where cuBLAS splits K for few rows; ours does not."""
    weight, rows = random(1024, 3072, dtype=torch.bfloat16, seed=1), random(256, 3072, dtype=torch.bfloat16)
    assert count_differing(torch.mm(rows[:1], weight.t()), torch.mm(rows, weight.t())[:1]) > 0
    assert_bitwise_equal(linear(rows[:1], weight), linear(rows, weight)[:1])


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements() -> None:
    bf16 = torch.bfloat16
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    rows, columns, k = 70_001, 32_776, 16  # an output of 2.3e9 elements
    a, weight = random(rows, k, dtype=bf16), random(columns, k, dtype=bf16, seed=1)
    for schedule in (None, REFERENCE, *POINTERS[2:], *DESCRIPTORS[1:3]):
        product = matmul(a, weight.t(), schedule=schedule)
        for part in (slice(0, 3), slice(rows - 3, rows)):
            assert_bitwise_equal(product[part], matmul(a[part], weight.t(), schedule=REFERENCE))
        del product
    storage = torch.empty(5 << 29, dtype=bf16, device=DEVICE)  # 2.7e9 elements
    small = random(64, 64, dtype=bf16)
    apart = storage.as_strided((64, 64), (40_000_000, 1))
    apart.copy_(small)
    for schedule in (None, REFERENCE, POINTERS[2]):
        expected = matmul(small, small, schedule=schedule)
        assert_bitwise_equal(matmul(apart, small, schedule=schedule), expected)  # rows far apart
        assert_bitwise_equal(matmul(small, apart, schedule=schedule), expected)  # steps of K far apart
        flipped = matmul(apart.t(), small, schedule=schedule)
        assert_bitwise_equal(flipped, matmul(small.t(), small, schedule=schedule))
        assert_bitwise_equal(matmul(small, apart.t(), schedule=schedule), matmul(small, small.t(), schedule=schedule))


# -- the choice -------------------------------------------------------------------------------------------------------


def all_candidates() -> set[Schedule]:
    shapes = [(1 << i, n, 1024) for i in range(14) for n in (1, 576, 2560, 4096, 24576, 151936)]
    return {s for dtype in UNIT for shape in shapes for s in candidates(dtype, *shape, dtype != torch.float32)}


def test_schedules_as_text_and_back() -> None:
    found = all_candidates()
    assert len(found) > 60
    assert any(sum(s.columns) == s.block_n == 160 and s.columns[1] == 32 for s in found)
    for schedule in found:
        assert all(part & (part - 1) == 0 for part in schedule.columns) and sum(schedule.columns) == schedule.block_n
        assert Schedule.parse(str(schedule)) == schedule
    for text in ("", "tma 128x256 w8 s3 g8", "wmma 16x16x16 w4 s3 g8", f"{REFERENCE} fast"):
        with pytest.raises(ValueError):
            Schedule.parse(text)


def test_buckets() -> None:
    assert [bucket(m) for m in (0, 1, 2, 3, 4, 5, 127, 128, 129, 8191, 8193, 10**6)] == [
        1, 1, 2, 4, 4, 8, 128, 128, 256, 8192, 8192, 8192,
    ]  # fmt: skip


@pytest.fixture
def fresh_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    table = {"GPU X": {"bfloat16": {"1024,512": {"1": "pointer 16x16x256 w4 s4 g8", "64": "tma 64x64x64 w4 s3 g8"}}}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(matmul_schedules, "TABLE", path)
    cached = (matmul_schedules._choose, matmul_schedules._table, matmul_schedules._tuned)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("fresh_table")
def test_choice_takes_the_row_the_nearest_row_or_the_heuristic() -> None:
    bf16, tuned = torch.bfloat16, Schedule("tma", 64, 64, 64, 4, 3)
    assert choose("GPU X", bf16, 1, 1024, 512, True) == Schedule("pointer", 16, 16, 256, 4, 4)
    assert choose("GPU X", torch.float16, 33, 1024, 512, True) == tuned
    assert choose("GPU X", bf16, 5000, 1024, 512, True) == tuned  # the largest bucket that was tuned
    assert choose("GPU X", bf16, 64, 4096, 4096, True) == tuned  # the nearest shape
    for other in (choose("GPU X", bf16, 64, 1024, 512, False), choose("GPU Y", bf16, 64, 1024, 512, False)):
        assert other == heuristic(bf16, 64, 1024, 512, False)  # its operands are no descriptors', or it has no row
    assert choose("GPU X", torch.float32, 1, 1024, 512, True) == heuristic(torch.float32, 1, 1024, 512, True)


def test_the_heuristic_fits_every_gpu_and_shape() -> None:
    for dtype in UNIT:
        size = dtype.itemsize
        for m in (1, 17, 33, 65, 129, 300, 8192):
            for n, k in ((1, 1), (576, 1536), (4096, 4096), (151936, 1024)):
                for tma_ok in (False, dtype != torch.float32):
                    s = heuristic(dtype, bucket(m), n, k, tma_ok)
                    assert tma_ok or s.form == "pointer"
                    bytes_needed = (s.block_m + s.block_n) * s.block_k * size * s.num_stages
                    assert bytes_needed <= (227 if s.form == "tma" else 96) << 10, s


def test_the_committed_table_is_sound() -> None:
    for gpu in json.loads(matmul_schedules.TABLE.read_text()):
        for (n, k), row in matmul_schedules._tuned(gpu).items():
            assert n > 0 and k > 0 and set(row) <= {1 << i for i in range(14)}
            for m, schedule in row.items():
                assert schedule in candidates(torch.bfloat16, m, n, k, True), (n, k, m, str(schedule))


def test_candidates_are_few_and_distinct() -> None:
    for m in (1, 16, 32, 64, 128, 256, 8192):
        for n in (576, 4096, 151936):
            found = candidates(torch.bfloat16, m, n, 1024, True)
            assert 5 <= len(found) <= 19 and len(found) == len(set(found))
            assert all(replace(s, form="pointer") == s for s in candidates(torch.bfloat16, m, n, 1024, False))


# -- the tuner --------------------------------------------------------------------------------------------------------


def test_shapes_of_the_models() -> None:
    found = {(s.n, s.k): s for s in shapes()}
    assert len(found) == len(shapes()) == 32
    assert found[6144, 4096].names == ("Qwen3-8B qkv_proj", "Llama-3.1-8B qkv_proj") and not found[6144, 4096].lm_head
    assert found[960, 576].rows[-1] == 8192 and found[49152, 576].rows[-1] == 256
    assert found[49152, 576].out_dtype == torch.float32


def test_the_table_is_extended_shape_by_shape(tmp_path: Path) -> None:
    small, large = (Shape(n, 64, False, ("x",)) for n in (96, 1024))
    path = tmp_path / "table.json"
    path.write_text("{}\n")
    for shape, gpu in ((large, "GPU B"), (large, "GPU A"), (small, "GPU A"), (small, "GPU A")):
        points = [point(shape, m, str(REFERENCE), 1.0, {"cublas": 2.0, "fixed": 3.0}) for m in (1, 2)]
        matmul_tune.write_table(path, gpu, shape, points)
    row = {"1": str(REFERENCE), "2": str(REFERENCE)}
    rows = {"96,64": row, "1024,64": row}
    assert json.loads(path.read_text()) == {"GPU A": {"bfloat16": rows}, "GPU B": {"bfloat16": {"1024,64": row}}}
    assert path.read_text().index('"96,64"') < path.read_text().index('"1024,64"')
    assert sum(line.startswith('   "') for line in path.read_text().splitlines()) == 3  # a line a shape
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_the_summary_names_the_median_and_the_worst() -> None:
    shape = Shape(96, 64, False, ("x",))
    points = [point(shape, m, "", 1.0 + m / 10, {"cublas": 1.0, "fixed": 5.0 - m}) for m in (1, 2, 4)]
    median, fixed_median, worst, fixed_worst = summary_lines(points)
    assert isinstance(median, Comparison) and isinstance(fixed_median, Comparison)
    assert isinstance(worst, Comparison) and isinstance(fixed_worst, Comparison)
    assert (round(median.ratio, 6), round(worst.ratio, 6)) == (1.2, 1.4) and median.passed is worst.passed is False
    assert (fixed_median.ratio, fixed_worst.ratio, fixed_worst.passed) == (3.0, 4.0, None)
    assert worst.case.endswith("N96 K64 M4") and fixed_worst.case.endswith("N96 K64 M1")


@pytest.mark.gpu
def test_tuning_finds_equal_schedules_and_writes_what_choose_reads(tmp_path: Path) -> None:
    table, report = tmp_path / "table.json", tmp_path / "report.json"
    arguments = ["--tune", "--shapes", "576,576", "--out", str(table), "--report", str(report), "--workers", "4"]
    assert main(arguments) == 0
    (rows,) = json.loads(table.read_text()).values()
    assert list(rows["bfloat16"]["576,576"]) == [str(1 << i) for i in range(14)]
    for m, text in rows["bfloat16"]["576,576"].items():
        assert Schedule.parse(text) in candidates(torch.bfloat16, int(m), 576, 576, True)
    written = json.loads(report.read_text())
    assert written["differing"] == [] and len(written["times"]) == 14
    for time in written["times"]:
        assert 0 < time["floor_seconds"] < time["seconds"] < 0.01


@pytest.mark.gpu
def test_a_schedule_with_other_bytes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner against a product that is wrong under every pointer schedule but the reference."""

    def broken(*arguments: Tensor, schedule: Schedule, **options: torch.dtype) -> Tensor:
        product = matmul(*arguments, schedule=schedule, **options)
        return product if schedule == REFERENCE or schedule.form == "tma" else product + 1

    monkeypatch.setattr(matmul_tune, "matmul", broken)
    (shape,) = (s for s in shapes() if (s.n, s.k) == (576, 576))
    x, weight = operands(shape, 64, torch.device(DEVICE))
    found = matmul_tune.tune_point(shape, x, weight)
    assert found.schedule.startswith("tma") and found.differing
    assert all(text.startswith("pointer") for text in found.differing)


def test_no_gpu_or_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="no shape"):
        main(["--shapes", "1,1"])
    if DEVICE == "cpu":
        with pytest.raises(ConfigError, match="CUDA"):
            main(["--tune"])


def test_linear_remembers_which_operand_is_unaligned() -> None:
    """Two calls alike but for the operand that starts off a 16-byte border: each needs its own compiled variant."""
    x, weight, bias = (torch.randn(n + 1, device=DEVICE).half() for n in (5 * 64, 96 * 64, 96))
    expected = None
    for off in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)) * 2:
        tensors = []
        for data, start, shape in zip((x, weight, bias), off, ((5, 64), (96, 64), (96,)), strict=True):
            tensors.append(torch.empty_like(data)[start:][: data.numel() - 1].copy_(data[1:]).view(shape))
        out = linear(*tensors)
        expected = out if expected is None else expected
        assert_bitwise_equal(out, expected, f"{off}")
