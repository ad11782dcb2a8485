"""The cap of logits is near float64, and a logit's bits depend on that logit alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import softcap
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORE_INTERPRETER = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def logits(*shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 40).to(DEVICE)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (1, 1), (7, 147), (2, 1023), (3, 1025)])
def test_against_float64(shape: tuple[int, int], cap: float) -> None:
    """It is within 8 units of float32 of float64: those of tanh and of the two products."""
    x = logits(*shape)
    out, truth = softcap.softcap(x, cap), reference.softcap(x, cap)
    assert out.dtype == torch.float32 and out.shape == x.shape
    assert ((out - truth).abs() <= 8 * 2.0**-24 * truth.abs()).all()


def test_a_logit_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit has the same bytes alone, anywhere in a row, beside NaN, in views and in blocks of another size."""
    x = logits(5, 300)
    whole = softcap.softcap(x, 30.0)
    assert_bitwise_equal(softcap.softcap(x[2:3, 7:8], 30.0), whole[2:3, 7:8])
    assert_bitwise_equal(softcap.softcap(x.t(), 30.0), whole.t())
    assert_bitwise_equal(softcap.softcap(x.flip(1), 30.0).flip(1), whole)
    assert count_differing(whole, x.clamp(-30, 30)) > 1000
    poisoned = x.clone()
    poisoned[0] = torch.nan
    assert_bitwise_equal(softcap.softcap(poisoned, 30.0)[1:], whole[1:])
    for block, warps in ((16, 1), (4096, 8)):
        monkeypatch.setattr(softcap, "BLOCK", block)
        monkeypatch.setattr(softcap, "WARPS", warps)
        assert_bitwise_equal(softcap.softcap(x, 30.0), whole)


@IGNORE_INTERPRETER
def test_edges() -> None:
    """Infinities become the cap, NaN stays NaN, and larger logits never become smaller ones."""
    x = torch.tensor([torch.inf, -torch.inf, 3e38, 0.0, torch.nan], device=DEVICE)
    out = softcap.softcap(x, 30.0)
    assert out[:4].tolist() == [30.0, -30.0, 30.0, 0.0] and out[4].isnan()
    rising = softcap.softcap(torch.linspace(-400, 400, 4097, device=DEVICE), 30.0)
    assert (rising.diff() >= 0).all() and rising[0] == -30 and rising[-1] == 30


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements() -> None:
    n = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 9 * n:
        pytest.skip("needs 19 GB of GPU memory")
    x = torch.zeros(n, device=DEVICE)
    x[-3:] = logits(3)
    out = softcap.softcap(x, 30.0)
    assert_bitwise_equal(out[-3:], softcap.softcap(x[-3:].clone(), 30.0))
    assert not out[:-3].any()
