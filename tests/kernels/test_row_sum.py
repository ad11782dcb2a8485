"""Fixed-point row sums are right to a rounding, and do not depend on the order, as float32 sums do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import row_sum
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.random_tensors import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy warns


@triton.jit
def _mean_square_kernel(
    x_ptr, out_ptr, float_ptr, exponent_ptr, rows, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask, 0.0).to(tl.float32)
    exponent = row_sum.row_exponent(x, 1)
    tl.store(exponent_ptr + row, exponent, row < rows)
    tl.store(out_ptr + row, row_sum.mean_square(x, columns, 1), row < rows)
    tl.store(float_ptr + row, tl.sum(x * x, 1), row < rows)


@triton.jit
def _round_trip_kernel(x_ptr, fixed_ptr, scaled_ptr, exponent_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(fixed_ptr + i, row_sum.from_fixed(row_sum.to_fixed(x)))
    exponent = tl.load(exponent_ptr + i)
    tl.store(scaled_ptr + i, row_sum.scale_down(exponent) * row_sum.scale_up(exponent))


def mean_square(x: Tensor, rows_per_program: int = 1, warps: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """[n, K] -> float32 [n] mean squares, float32 [n] sums of squares by tl.sum, and int32 [n] row exponents."""
    n, columns = x.shape
    out, floats = torch.empty(2, n, device=DEVICE)
    exponents = torch.empty(n, dtype=torch.int32, device=DEVICE)
    _mean_square_kernel[(triton.cdiv(n, rows_per_program),)](
        x.to(DEVICE).contiguous(),
        out,
        floats,
        exponents,
        n,
        columns,
        BLOCK=max(16, triton.next_power_of_2(columns)),
        ROWS=rows_per_program,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return out, floats, exponents


@pytest.mark.parametrize("columns", [1, 7, 63, 64, 65, 577, 4097, 16384])
@pytest.mark.parametrize("scale", [2.0**-50, 1.0, 2.0**45])
def test_mean_square_against_float64(columns: int, scale: float) -> None:
    x = randn(4, columns) * scale
    x[2, columns // 2] = 3e4 * scale  # the outlier sets the row's grid
    x[3] = 0
    truth = x.double().square().mean(1)
    result = mean_square(x)[0].cpu()
    # Each square, the sum and the division are rounded.
    assert ((result - truth).abs() <= 2.5 * 2.0**-24 * truth).all()


def test_extremes() -> None:
    """Mean squares under- and overflow as float32's do; infinity gives NaN; exponents are the rows' largest."""
    x = torch.tensor(
        [[1e-45, 0.0], [3e38, 3e38], [1e19, 1.0], [0.0, -0.0], [torch.inf, 1], [1, torch.nan], [-1e-20, 0]]
    )
    result, _, exponents = mean_square(x)
    expected = x.square().mean(1)  # float32 gives 0 below its range, and infinity above
    expected[4] = torch.nan
    assert torch.equal(result.cpu().isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.allclose(result.cpu()[finite], expected[finite], rtol=1e-6, atol=2e-45)
    assert exponents.tolist() == [0, 254, 190, 0, 255, 255, 60]


def test_fixed_point_and_scales() -> None:
    """Fixed point keeps 44 fractional bits, rounding toward zero; a row's two scales multiply to 1."""
    x = torch.tensor([16.0, -16.0, 1.0, 2.0**-44, 1.5 * 2.0**-44, -1.5 * 2.0**-44, 2.0**-45, -1 / 3])
    exponents = torch.tensor([0, 1, 2, 127, 252, 253, 254, 255], dtype=torch.int32)
    fixed, scaled = torch.empty(2, 8, device=DEVICE)
    _round_trip_kernel[(1,)](x.to(DEVICE), fixed, scaled, exponents.to(DEVICE), BLOCK=8)
    toward_zero = (x.double() * 2.0**44).trunc() * 2.0**-44
    assert_bitwise_equal(fixed.cpu(), (toward_zero + 0.0).float())
    assert scaled[:-1].eq(1.0).all()
    assert scaled[-1].isnan()


@pytest.mark.parametrize("columns", [577, 4096])
def test_order_cannot_matter(columns: int) -> None:
    x = randn(8, columns)
    whole = mean_square(x)[0]
    orders = [torch.randperm(columns, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for order in orders:
        assert_bitwise_equal(mean_square(x[:, order])[0], whole)
    squares = x.square().numpy()  # float32 sums, one term after another, do depend on the order
    chain = squares.cumsum(1, dtype=np.float32)[:, -1]
    assert any(count_differing(squares[:, order].cumsum(1, dtype=np.float32)[:, -1], chain) for order in orders)


def test_schedule_cannot_matter() -> None:
    x = randn(5, 577)
    whole = mean_square(x)[0]
    assert_bitwise_equal(mean_square(x, rows_per_program=4)[0], whole)
    assert_bitwise_equal(mean_square(x[3:4])[0], whole[3:4])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 577, 4096])
def test_layouts_change_a_float_sum_and_not_ours(columns: int) -> None:
    """Numbers of rows and warps per program change Triton's float sums, and no byte of ours."""
    x = randn(256, columns)
    whole, float_sum, _ = mean_square(x)
    differing = 0
    for rows, warps in [(1, 1), (1, 8), (4, 2), (8, 4), (2, 16)]:
        means, floats, _ = mean_square(x, rows, warps)
        assert_bitwise_equal(means, whole)
        differing += count_differing(floats, float_sum)
    assert differing > 0
