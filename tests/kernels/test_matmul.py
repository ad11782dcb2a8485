"""`native` products: values close to float64, and the same bytes under every schedule and for any strides.

On the CPU the interpreter multiplies with NumPy, whose order of summation follows the tile: there, bytes are compared
between equal tiles only; across schedules they are compared on the GPU. On some processors NumPy's product gives a row
other bits in another place of a tile (OpenBLAS on a Zen 3, 16 x 16 x 16 in float32), so the tests that move rows do so
with small integers, whose sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.matmul_candidates import candidates
from evalengine.kernels.matmul import REFERENCE, MatmulSchedule, bmm, linear, matmul
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter computes bf16 wrongly
DTYPES = [torch.float32, torch.float16, BF16]
HALVES = [torch.float16, BF16]
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # the largest relative error of a rounding

POINTERS = [
    MatmulSchedule("pointer", 16, 32, 16),
    MatmulSchedule("pointer", 32, 16, 32, group_m=2),
    MatmulSchedule("pointer", 16, 64, 32, swap=True),
]
DESCRIPTORS = [
    MatmulSchedule("tma", 16, 32, 32),
    MatmulSchedule("tma", 64, 64, 16, persistent=True, group_m=2),
    MatmulSchedule("tma", 16, 64, 32, swap=True),
    MatmulSchedule("tma", 64, 64, 16, num_warps=8, persistent=True, subtiles=2),
    MatmulSchedule("tma", 32, 64, 16, swap=True, persistent=True, subtiles=2),
    MatmulSchedule("tma", 16, 48, 32),  # split into 32 + 16 columns
    MatmulSchedule("tma", 64, 80, 16, persistent=True, group_m=2, subtiles=2),
]
SHAPES = [(1, 1, 1), (5, 7, 3), (17, 65, 33), (31, 1, 40), (1, 67, 129)]  # M, N, K
ALIGNED = [(1, 8, 8), (17, 72, 40), (67, 136, 72)]  # rows are multiples of 16 bytes, as descriptors need


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def movable(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns random numbers; in the interpreter, small integers, whose sums are exact in any place of a tile."""
    values = random(*shape, dtype=dtype, seed=seed)
    return values if DEVICE == "cuda" else (values * 4).round()


def assert_close(actual: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """Allows one rounding to the output's dtype, and the float32 chain's K roundings of 2^-23 of the magnitudes."""
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
def test_pointer_forms_are_float64_rounded(schedule: MatmulSchedule | None, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        a, b, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1).t(), random(n, dtype=dtype, seed=2)
        assert_close(matmul(a, b, schedule=schedule), a, b)
        wide = matmul(a, b, bias, out_dtype=torch.float32, schedule=schedule)
        assert wide.dtype == torch.float32
        assert_close(wide, a, b, bias)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("schedule", DESCRIPTORS, ids=str)
def test_descriptor_forms_are_float64_rounded(schedule: MatmulSchedule, dtype: torch.dtype) -> None:
    for m, n, k in ALIGNED:
        a, b, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1).t(), random(n, dtype=dtype, seed=2)
        assert_close(matmul(a, b, bias, schedule=schedule), a, b, bias)
        assert_close(matmul(a, b, out_dtype=torch.float32, schedule=schedule), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_after_the_bias_unless_asked(dtype: torch.dtype) -> None:
    """The output is rounded once, after the bias; with `round_product` the product is rounded before it, too."""
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
    """linear is close to float64, as computed here and by `reference`."""
    x, weight, bias = (
        random(3, 5, dtype=torch.float32),
        random(7, 5, dtype=torch.float32),
        random(7, dtype=torch.float32),
    )
    assert_close(linear(x, weight, bias), x, weight.t(), bias)
    torch.testing.assert_close(linear(x, weight, bias).double(), reference.linear(x, weight, bias), rtol=0, atol=1e-5)


# -- the operands' layouts --------------------------------------------------------------------------------------------


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Yields views equal to x [R, C] in several layouts; the storage between their elements is NaN."""
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
    """Products without rows or columns are empty, and sums of no terms are 0 or the bias."""
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
    """Shapes, dtypes or layouts that do not suit the product or the schedule are a ValueError."""
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
    """A row has the same bytes alone and in any place of the batch."""
    a, weight = movable(35, 72, dtype=dtype), movable(48, 72, dtype=dtype, seed=1)
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
    """Compares float32 outputs, because a rounding to half precision could hide a difference."""
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
        for _ in range(2):  # the second call repeats the first call's launch
            assert_bitwise_equal(linear(x[:m], weight, bias, out_dtype=torch.float32), expected[:m])
    assert len(tried) >= (5 if tma_ok else 2)


@pytest.mark.gpu
def test_the_float32_chain_is_a_loop_of_fused_multiply_adds() -> None:
    """A float32 product adds its K terms one by one, each by a fused multiply-add."""
    a, b = random(4, 300, dtype=torch.float32), random(300, 5, dtype=torch.float32, seed=1)
    left, right = a.cpu().double(), b.cpu().double()
    chain = torch.zeros(4, 5, dtype=torch.float64)
    for step in range(300):  # float64 holds a product of two float32 exactly; its sum with a third nearly always
        chain = (chain + left[:, step, None] * right[step]).float().double()
    assert_bitwise_equal(matmul(a, b), chain.float().to(DEVICE))


@pytest.mark.gpu
def test_inverse_cublas_changes_bits_with_the_number_of_rows() -> None:
    """cuBLAS splits K for few rows, which changes bits; our kernels never split it."""
    weight, rows = random(1024, 3072, dtype=torch.bfloat16, seed=1), random(256, 3072, dtype=torch.bfloat16)
    assert count_differing(torch.mm(rows[:1], weight.t()), torch.mm(rows, weight.t())[:1]) > 0
    assert_bitwise_equal(linear(rows[:1], weight), linear(rows, weight)[:1])


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements() -> None:
    """Outputs and operands of more than 2^31 elements give the bytes of small ones."""
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


def test_linear_remembers_which_operand_is_unaligned() -> None:
    """Calls that differ only in which operand is not 16-byte aligned each need their own compiled variant."""
    x, weight, bias = (torch.randn(n + 1, device=DEVICE).half() for n in (5 * 64, 96 * 64, 96))
    expected = None
    for off in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)) * 2:
        tensors = []
        for data, start, shape in zip((x, weight, bias), off, ((5, 64), (96, 64), (96,)), strict=True):
            tensors.append(torch.empty_like(data)[start:][: data.numel() - 1].copy_(data[1:]).view(shape))
        out = linear(*tensors)
        expected = out if expected is None else expected
        assert_bitwise_equal(out, expected, f"{off}")
