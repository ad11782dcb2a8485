"""The elementary functions in kernels have torch's bits on CUDA or an error bound; the row maximum keeps NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from tests.bitwise import assert_bitwise_equal, count_differing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORE_INTERPRETER = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@triton.jit
def _functions_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    n = tl.num_programs(0) * BLOCK
    tl.store(out_ptr + i, device_math.exp(x))
    tl.store(out_ptr + n + i, device_math.log(tl.abs(x)))
    tl.store(out_ptr + 2 * n + i, device_math.rsqrt(tl.abs(x)))
    tl.store(out_ptr + 3 * n + i, tl.exp(x))


@triton.jit
def _softcap_kernel(x_ptr, out_ptr, cap, reciprocal, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, device_math.tanh(x))
    tl.store(out_ptr + tl.num_programs(0) * BLOCK + i, device_math.softcap(x, cap, reciprocal))


@triton.jit
def _row_max_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)[None, :])
    tl.store(out_ptr + tl.arange(0, 1), device_math.row_max(x, 1))


def functions(x: Tensor) -> Tensor:
    """float32 [n] -> [4, n]: exp(x), log|x|, rsqrt|x|, and Triton's own exp(x)."""
    out = torch.empty(4, len(x), device=DEVICE)
    _functions_kernel[(len(x) // 1024,)](x.to(DEVICE), out, BLOCK=1024, enable_fp_fusion=False)
    return out


def values(count: int) -> Tensor:
    """Returns random float32 numbers of magnitudes around 2^-60 to 2^7."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=generator) * torch.exp2(torch.randint(-60, 7, (count,), generator=generator))


@pytest.mark.parametrize(
    ("row", "truth"), [(0, torch.exp), (1, lambda v: v.abs().log()), (2, lambda v: v.abs() ** -0.5)]
)
def test_against_float64(row: int, truth: Callable[[Tensor], Tensor]) -> None:
    """exp, log and rsqrt are within 2 ulp of float64."""
    x = values(2048)
    x = x[x.abs() < 80]
    x = torch.cat((x, torch.ones(2048 - len(x))))
    expected = truth(x.double())
    error = (functions(x)[row].cpu() - expected).abs()
    assert (error <= 2.0**-22 * expected.abs() + 2.0**-149).all()


def tanh_and_softcap(x: Tensor, cap: float) -> Tensor:
    """float32 [n] -> [2, n]: tanh(x) and cap tanh(x / cap), in blocks of 1024 that numbers of 1 fill."""
    padded = torch.cat((x, torch.ones(-len(x) % 1024))).to(DEVICE)
    out = torch.empty(2, len(padded), device=DEVICE)
    _softcap_kernel[(len(padded) // 1024,)](padded, out, cap, 1 / cap, BLOCK=1024, enable_fp_fusion=False)
    return out[:, : len(x)].cpu()


@IGNORE_INTERPRETER
def test_tanh_and_softcap_against_float64() -> None:
    """tanh is within 3 ulp of float64 (4 in the interpreter, whose fma rounds twice), and odd; softcap within 6."""
    x = torch.cat((values(60_000), torch.linspace(-12, 12, 60_001), torch.tensor([0.5, 0.49999997, 9.5, 1e-40, 1e30])))
    for result, truth, ulps in zip(
        tanh_and_softcap(x, 30.0), (x.double().tanh(), 30 * (x.double() / 30).tanh()), (3, 6), strict=True
    ):
        wrong = torch.from_numpy(np.spacing(truth.abs().float().numpy())) * (ulps + (DEVICE == "cpu"))
        assert ((result - truth).abs() <= wrong + 30 * 2.0**-149).all()  # x / 30 may be subnormal
    assert_bitwise_equal(tanh_and_softcap(-x[x != 0], 30.0), -tanh_and_softcap(x[x != 0], 30.0))


@IGNORE_INTERPRETER
def test_tanh_and_softcap_at_the_edges() -> None:
    """tanh is 1 far out and at infinity, 0 at 0, and NaN at NaN alone."""
    x = torch.tensor([torch.inf, -torch.inf, 3e38, 10.0, 0.0, -0.0, torch.nan])
    tanh, capped = tanh_and_softcap(x, 2.0)
    assert tanh[:6].tolist() == [1.0, -1.0, 1.0, 1.0, 0.0, 0.0] and tanh[6].isnan()
    assert capped[:3].tolist() == [2.0, -2.0, 2.0] and capped[6].isnan()


@pytest.mark.gpu
def test_torchs_bits_and_not_those_of_tl_exp() -> None:
    """exp, log and rsqrt have torch's bits on CUDA; Triton's own exp has not, so that a test of bits can fail."""
    x = values(1 << 20)
    out = functions(x)
    on_device = x.to(DEVICE)
    for row, expected in enumerate((on_device.exp(), on_device.abs().log(), on_device.abs().rsqrt())):
        assert_bitwise_equal(out[row], expected)
    assert count_differing(out[3], on_device.exp()) > 0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("place", [0, 100, 255])
def test_row_max_keeps_infinities_and_nan(bad: float, place: int) -> None:
    x = torch.linspace(-5.0, 5.0, 256)
    out = torch.empty(1, device=DEVICE)
    _row_max_kernel[(1,)](x.to(DEVICE), out, BLOCK=256)
    assert out.item() == 5.0
    x[place] = bad
    _row_max_kernel[(1,)](x.to(DEVICE), out, BLOCK=256)
    assert not out.isfinite().item()
    _row_max_kernel[(1,)](torch.full((256,), -torch.inf, device=DEVICE), out, BLOCK=256)
    assert out.item() == -torch.inf
