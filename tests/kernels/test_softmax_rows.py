"""softmax and log_softmax are the contract's arithmetic: a row has the same bytes anywhere and under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels.log_softmax import log_softmax
from evalengine.kernels.softmax import softmax
from evalengine.kernels.softmax_parts import CHUNK
from tests.bitwise import assert_bitwise_equal
from tests.kernels import softmax_contract as contract
from tests.kernels.softmax_contract import DTYPES, SCHEDULES, randn

COLUMNS = [1, 7, 65, 577, 4095, 4096, 4097, 9001]
OPS = pytest.mark.parametrize("op", [softmax, log_softmax], ids=["softmax", "log_softmax"])
Op = Callable[..., Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy warns on rows of NaN


@OPS
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_contracts_bits_under_every_schedule(op: Op, dtype: torch.dtype, columns: int) -> None:
    x = (randn(3, columns) * 6).to(dtype)
    x[1, : columns // 2] = -torch.inf
    second: Any = contract.softmax if op is softmax else contract.log_softmax
    expected = second(x)
    assert_bitwise_equal(op(x, out_dtype=torch.float32), expected)
    for schedule in SCHEDULES:
        assert_bitwise_equal(op(x, out_dtype=torch.float32, _schedule=schedule), expected)
    assert_bitwise_equal(op(x), expected.to(dtype))


@OPS
def test_order_inside_a_chunk_cannot_matter(op: Op) -> None:
    x = randn(3, 5000) * 4
    order = torch.cat((torch.randperm(CHUNK, generator=torch.Generator().manual_seed(1)), torch.arange(CHUNK, 5000)))
    assert_bitwise_equal(op(x[:, order]), op(x)[:, order])


@OPS
@pytest.mark.parametrize("columns", [65, 4500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_anywhere_and_under_any_schedule(op: Op, dtype: torch.dtype, columns: int) -> None:
    """A row has the same bytes alone, in any place and under any schedule."""
    x = (randn(11, columns) * 4).to(dtype)
    whole = op(x)
    for start, end in [(0, 1), (10, 11), (3, 8)]:
        assert_bitwise_equal(op(x[start:end]), whole[start:end])
    assert_bitwise_equal(op(x.flip(0)).flip(0), whole)
    for schedule in SCHEDULES:
        assert_bitwise_equal(op(x, _schedule=schedule), whole)


@OPS
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_strides_and_alignment(op: Op, dim: int) -> None:
    """Any dimension of a strided, misaligned tensor has the bytes of the last one of a contiguous tensor."""
    x = randn(5, 7, 9)[1:, ::2, 1:].transpose(0, 2)
    out = op(x, dim)
    assert out.is_contiguous() and out.shape == x.shape
    rows = x.movedim(dim, -1).contiguous()
    assert_bitwise_equal(out.movedim(dim, -1), op(rows.view(-1, rows.shape[-1])).view(rows.shape))
