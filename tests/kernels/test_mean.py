"""mean is close to float64 over any dims, and its bits depend on no order, batch or schedule."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from evalengine.kernels.mean import mean
from tests import random_tensors
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, BFLOAT16]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy warns on rows of NaN


randn = partial(random_tensors.randn, device=DEVICE)


@pytest.mark.parametrize("columns", [1, 7, 63, 65, 577, 4097, 16384, 16385, 50000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype: torch.dtype, columns: int) -> None:
    """mean is within its grid and its roundings of float64."""
    x = randn(3, columns, dtype=dtype)
    x[1] = x[1].abs()  # in this row no terms cancel
    truth = reference.mean(x, -1)
    parts = -(-columns // 16384)
    largest = x.double().abs().amax(1)  # the grid's unit is 2^-44 of this, and rounds toward zero
    rounding = (2 + parts) * 2.0**-24 * x.double().abs().mean(1).clamp(max=1) * (parts > 1) + 2.0**-43 * largest
    assert ((mean(x, -1, out_dtype=torch.float32) - truth).abs() <= rounding + 2.01 * 2.0**-24 * truth.abs()).all()
    rounded = (mean(x, -1) - truth).abs()
    assert (rounded <= rounding + (1.01 * UNIT[dtype] + 2.01 * 2.0**-24) * truth.abs() + 2.0**-24).all()


@pytest.mark.parametrize("dim", [0, 1, -1, (0, 2), (2, 1), (), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_dims_and_shapes_as_torch(dim: int | tuple[int, ...], keepdim: bool) -> None:
    x = randn(5, 6, 14)[:, ::2, 1:]
    expected = x.double().mean(dim, keepdim)
    out = mean(x, dim, keepdim)
    assert out.shape == expected.shape and out.dtype == x.dtype
    assert (out - expected).abs().max() < 1e-7
    assert mean(x, dim, keepdim, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("columns", [577, 20000])
def test_order_inside_a_part_cannot_matter(columns: int) -> None:
    x = randn(4, columns)
    whole = mean(x, 1)
    order = torch.randperm(min(columns, 16384), generator=torch.Generator().manual_seed(1))
    order = torch.cat((order, torch.arange(16384, columns))) if columns > 16384 else order
    assert_bitwise_equal(mean(x[:, order], 1), whole)
    values = x.cpu().numpy()  # float32 sums, one term after another, do depend on the order
    chain, other = (v.cumsum(1, dtype=np.float32)[:, -1] for v in (values, values[:, order]))
    assert count_differing(chain, other) > 0


def test_parts_are_added_in_order() -> None:
    """Parts of 16,384 columns are each rounded to float32, and added from first to last."""
    x = randn(5, 40000, seed=3)
    parts = [part.double() for part in x.split(16384, 1)]
    total = torch.zeros(5, device=DEVICE)
    for part in parts:
        total = total + (part.sum(1).float() / 40000)
    assert torch.allclose(mean(x, 1), total, rtol=0, atol=2.0**-30)
    assert count_differing(mean(x.flip(1), 1), mean(x, 1)) > 0  # flipped columns fall into other parts: other bits


@pytest.mark.parametrize("columns", [65, 577, 17000])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_rows_alone_anywhere_and_under_any_schedule(dtype: torch.dtype, columns: int) -> None:
    """A row has the same bytes alone, in any layout and under any schedule."""
    x = randn(9, columns, dtype=dtype)
    whole = mean(x, 1)
    for start, end in [(0, 1), (8, 9), (3, 7)]:
        assert_bitwise_equal(mean(x[start:end], 1), whole[start:end])
    assert_bitwise_equal(mean(x.t(), 0), whole)
    assert_bitwise_equal(mean(torch.cat((x, x), 1)[:, :columns], 1), whole)
    for schedule in [(4, 8), (2, 16), (1, 4)]:
        assert_bitwise_equal(mean(x, 1, _schedule=schedule), whole)


def test_edges() -> None:
    """Rows with infinities or NaN are NaN; tiny and huge numbers are right; wrong dtypes and dims are a ValueError."""
    x = randn(7, 65)
    x[0], x[1, 3], x[2, 64], x[3], x[4], x[5] = 0, torch.inf, torch.nan, 3e38, 2e-45, -1e-38
    out = mean(x, 1)
    assert out[0] == 0 and out[1:3].isnan().all()
    assert torch.allclose(out[3:6], reference.mean(x[3:6], 1).float(), rtol=1e-6, atol=2e-45)
    assert_bitwise_equal(out[6:], mean(x[6:], 1))
    assert mean(x[:0], 1).shape == (0,)
    assert mean(x[:0], 0).isnan().all()
    assert mean(torch.tensor(3.0, device=DEVICE), ()).item() == 3.0
    with pytest.raises(ValueError, match=r"not torch\.int64"):
        mean(torch.zeros(3, dtype=torch.int64, device=DEVICE), 0)
    for dim in (2, -3, (0, 5)):
        with pytest.raises(ValueError, match="mean over the dimensions"):
            mean(torch.ones(2, 3), dim)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last rows of a tensor of more than 2^31 elements have the bytes of a small tensor."""
    x = torch.zeros((1 << 31) // 4096 + 3, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = randn(3, 4096, dtype=torch.bfloat16)
    assert_bitwise_equal(mean(x, 1)[-3:], mean(x[-3:].clone(), 1))
