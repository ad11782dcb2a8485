"""softmax is the contract's arithmetic under any schedule, close to float64, and right for masked attention rows."""

from __future__ import annotations

import pytest
import torch

from evalengine.kernels.softmax import softmax
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels import softmax_contract as contract
from tests.kernels.softmax_contract import DEVICE, DTYPES, SCHEDULES, UNIT, randn
from tests.references import reference

COLUMNS = [1, 7, 65, 577, 4096, 4097, 9001]
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}  # the smallest subnormal
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy warns on rows of NaN


def test_other_chunks_give_other_bits() -> None:
    """CHUNK is arithmetic: another chunk gives other bytes."""
    x = randn(8, 9001)
    assert count_differing(contract.softmax(x, 1000), softmax(x)) > 0


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_against_float64(dtype: torch.dtype, columns: int, scale: float) -> None:
    """softmax is within its roundings of float64."""
    x = (randn(3, columns) * scale).to(dtype)
    truth = reference.softmax(x)
    below = x.double().amax(1, keepdim=True) - x.double()  # exp carries over the rounding of z - M
    bound = (1.01 * UNIT[dtype] + (4 + below) * 2.0**-23) * truth + SMALLEST[dtype]
    assert ((softmax(x) - truth).abs() <= bound).all()


@pytest.mark.parametrize("keys", [1, 33, 64, 65, 5000])
def test_masked_attention_rows(keys: int) -> None:
    """Masked keys get 0 and change no byte of the others; a row that is masked as a whole is NaN."""
    scores = randn(2, 3, 5, keys)
    visible = (torch.arange(keys, device=DEVICE) <= torch.arange(5, device=DEVICE)[:, None] * 7)[None, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    scores[1, 2, 4] = -torch.inf
    out = softmax(scores, -1)
    assert out[1, 2, 4].isnan().all()
    assert out.isnan().sum() == keys
    seen = visible.expand_as(out) & ~out.isnan()
    assert out[~seen & ~out.isnan()].eq(0).all()
    assert (out - reference.softmax(scores))[seen].abs().max() < 2e-7
    if keys > 40:  # a row has the bytes that it has without the masked keys
        assert_bitwise_equal(out[0, :, 4, :29], softmax(scores[0, :, 4, :29]))


@pytest.mark.parametrize("columns", [65, 5000])
def test_edges(columns: int) -> None:
    """Rows with NaN or +inf, or of -inf only, are NaN; huge numbers are right; integers are refused."""
    x = randn(7, columns)
    x[0], x[1, 64], x[2, columns - 1], x[3, 0] = -torch.inf, torch.inf, torch.nan, -torch.nan
    x[4], x[5, 1:] = 1e38, -torch.inf
    for schedule in SCHEDULES:
        out = softmax(x, _schedule=schedule)
        assert out[:4].isnan().all()
        assert torch.allclose(out[4], torch.full_like(out[4], 1 / columns), rtol=1e-6)
        assert out[5, 0] == 1 and out[5, 1:].eq(0).all()
        assert_bitwise_equal(out[6:], softmax(x[6:]))
    assert softmax(x[:0]).shape == (0, columns)
    assert softmax(torch.tensor(3.0, device=DEVICE), 0).item() == 1
    with pytest.raises(ValueError, match=r"not torch\.int64"):
        softmax(torch.zeros(2, 2, dtype=torch.int64, device=DEVICE))
