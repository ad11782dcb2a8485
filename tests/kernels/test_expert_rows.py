"""The row kernels of a mixture of experts: near float64, rounded where they say, and a row by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from evalengine.kernels import exact_mixture, expert_rows
from evalengine.layers.fast_mixture import clamped_swiglu as fast_swiglu
from tests import random_tensors
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(1, 1, 5), (3, 4, 1030), (7, 2, 64), (0, 3, 8)]  # T, k, H


randn = partial(random_tensors.randn, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_combine_adds_in_order_of_rank(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weights = randn(*shape, dtype=dtype), randn(*shape[:2], seed=1)
    total = torch.zeros(shape[0], shape[2], device=DEVICE)
    for rank in range(shape[1]):
        total = total + x[:, rank].float() * weights[:, rank, None]
    out = expert_rows.combine(x, weights)
    assert_bitwise_equal(out, total.to(dtype))
    if shape[0]:
        assert_bitwise_equal(expert_rows.combine(x[-1:], weights[-1:]), out[-1:])
        exact = exact_mixture.combine(x.cpu(), weights.cpu())
        torch.testing.assert_close(exact.double(), reference.combine(x.cpu(), weights.cpu()), rtol=1e-7, atol=1e-12)
    if shape == (3, 4, 1030) and dtype == torch.float32:
        flipped = expert_rows.combine(x.flip(1).contiguous(), weights.flip(1).contiguous())
        assert count_differing(flipped, out), "another order of the ranks is seen"


@pytest.mark.parametrize("shape", [(5, 70), (1, 1), (3, 1030), (0, 8)])
@pytest.mark.parametrize("of_row", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate(dtype: torch.dtype, of_row: bool, shape: tuple[int, int]) -> None:
    """A logit for each row, or the last columns of a wider tensor."""
    tokens, width = shape
    wide = randn(tokens, width + 8, dtype=dtype, seed=1) * 3
    x, logits = randn(*shape, dtype=dtype), wide[:, :1] if of_row else wide[:, 8:]
    out, truth = expert_rows.gate(x, logits), reference.gate(x.cpu(), logits.cpu())
    unit = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out.cpu().double(), truth, rtol=unit, atol=1e-7)
    assert_bitwise_equal(expert_rows.gate(x[2:3], logits[2:3]), out[2:3])
    exact = exact_mixture.gate(x.cpu(), logits.cpu())
    torch.testing.assert_close(exact.double(), truth, rtol=2**-23, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gate_has_torchs_bytes(dtype: torch.dtype) -> None:
    """For all 65,536 logits."""
    logits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(2**8, 2**8).cuda()
    x = randn(2**8, 2**8, dtype=dtype)
    out, torchs = expert_rows.gate(x, logits), torch.sigmoid(logits) * x
    assert torch.equal(out.isnan(), torchs.isnan())
    assert_bitwise_equal(out.nan_to_num(nan=0.0), torchs.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clamped_swiglu(dtype: torch.dtype) -> None:
    """Some numbers are beyond the clamps, on either side."""
    x = randn(6, 2 * 1030, dtype=dtype) * 5
    out, truth = expert_rows.clamped_swiglu(x), reference.clamped_swiglu(x.cpu())
    assert (x > 7).any() and (x < -7).any()
    unit = {torch.float32: 2**-20, torch.float16: 2**-8, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(out.cpu().double(), truth, rtol=unit, atol=unit)
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    assert_bitwise_equal(expert_rows.clamped_swiglu(wide[3:4]), out[3:4])
    torch.testing.assert_close(fast_swiglu(x), out, rtol=unit, atol=unit)
    exact = exact_mixture.clamped_swiglu(x.cpu())
    torch.testing.assert_close(exact.double(), truth, rtol=2**-22, atol=1e-12)


def test_the_clamped_swiglu_keeps_nan() -> None:
    x = randn(2, 20)
    x[0, 3] = x[1, 15] = torch.nan
    out = expert_rows.clamped_swiglu(x)
    assert out.isnan().nonzero().tolist() == [[0, 3], [1, 5]]
