"""The exact level's float64 functions agree with mpmath, have the right edges, and depend on no position or length."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact_math as em
from tests.bitwise import assert_bitwise_equal

mpmath.mp.dps = 40
RNG = random.Random(0)
COUNT = 3000


def float32_values(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).tolist()


EXP = float32_values([RNG.uniform(-87, 88) for _ in range(COUNT)] + [0.0, 1e-30, -1e-9, 0.5, -0.34657359, 88.7, -87.3])
POSITIVE = float32_values([2 ** RNG.uniform(-120, 120) for _ in range(COUNT)] + [1.0, 2.0, 0.5, 1.0000001, 0.99999994])
ANGLES = float32_values(
    [RNG.uniform(-131072, 131072) for _ in range(COUNT)]
    + [RNG.uniform(-7, 7) for _ in range(COUNT)]
    + [n * math.pi / 2 for n in range(64)]  # the float32 numbers nearest to a zero of sin or cos are the hardest
    + [0.0, 1e-20, 131071.0, 131072.0, 1e5]
)


@pytest.mark.parametrize(
    ("function", "truth", "values"),
    [
        pytest.param(em.exp, mpmath.exp, EXP, id="exp"),
        pytest.param(em.log, mpmath.log, POSITIVE, id="log"),
        pytest.param(em.sin, mpmath.sin, ANGLES, id="sin"),
        pytest.param(em.cos, mpmath.cos, ANGLES, id="cos"),
        pytest.param(em.rsqrt, lambda v: 1 / mpmath.sqrt(v), POSITIVE, id="rsqrt"),
        pytest.param(em.reciprocal, lambda v: 1 / v, POSITIVE + [-v for v in POSITIVE], id="reciprocal"),
        pytest.param(em.sigmoid, lambda v: 1 / (1 + mpmath.exp(-v)), EXP, id="sigmoid"),
    ],
)
def test_within_one_ulp_of_float32(
    function: Callable[[Tensor], Tensor], truth: Callable[[mpmath.mpf], mpmath.mpf], values: list[float]
) -> None:
    rounded = em.round_float32(function(torch.tensor(values, dtype=torch.float64))).tolist()
    worst = 0.0
    for value, result in zip(values, rounded, strict=True):
        expected = truth(mpmath.mpf(value))
        ulp = np.spacing(np.float32(abs(float(expected)))) if expected else 2.0**-149
        worst = max(worst, float(abs(mpmath.mpf(result) - expected) / mpmath.mpf(float(ulp))))
    assert worst <= 0.6  # the rounding to float32 alone is half an ulp


def test_exp_edges() -> None:
    """exp is 1 at zero, 0 and infinity far out, and NaN at NaN."""
    x = torch.tensor([0.0, -0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30], dtype=torch.float64)
    y = em.round_float32(em.exp(x))
    assert y[:2].tolist() == [1.0, 1.0]
    assert y[[2, 5]].tolist() == [0.0, 0.0]
    assert y[[3, 6]].tolist() == [torch.inf, torch.inf]
    assert y[4].isnan()


@pytest.mark.parametrize("function", [em.exp, em.log, em.sin, em.cos, em.rsqrt, em.reciprocal, em.sigmoid])
def test_a_value_does_not_depend_on_its_place(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(203, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 60 + 0.01
    whole = function(x)
    for start, length in [(0, 1), (1, 3), (5, 17), (7, 196), (200, 3)]:
        assert_bitwise_equal(function(x[start : start + length]), whole[start : start + length])


def test_torch_sigmoid_does_depend_on_the_place() -> None:
    """torch's sigmoid gives a value other bits in a shorter tensor, so that the test above can fail."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    whole = torch.sigmoid(x)
    assert any(not torch.equal(torch.sigmoid(x[:n]), whole[:n]) for n in range(1, 200))


def test_rounding_flushes_subnormals_and_minus_zero() -> None:
    tiny = 2.0**-126
    x = torch.tensor(
        [tiny, -tiny, tiny * (1 - 2**-40), -tiny / 2, 1e-45, -0.0, 1e39, torch.nan] * 5, dtype=torch.float64
    )
    y = em.round_float32(x)
    expected = torch.tensor([tiny, -tiny, 0.0, 0.0, 0.0, 0.0, torch.inf, torch.nan] * 5)
    assert_bitwise_equal(y[~x.isnan()], expected[~x.isnan()])
    assert y[x.isnan()].isnan().all()  # NaN survives in the vectorized body and in its tail
    out = torch.ones(40)
    em.store_float32(x, out)
    assert_bitwise_equal(out, y)


def test_widen_flushes_float32_subnormals_but_not_fp16s() -> None:
    x = torch.tensor([1e-40, -1e-40, 1.5, -0.0])
    assert_bitwise_equal(em.widen(x), torch.tensor([0.0, 0.0, 1.5, 0.0], dtype=torch.float64))
    half = torch.tensor([2.0**-24], dtype=torch.float16)
    assert em.widen(half).item() == 2.0**-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_row_absmax_and_exponent(dtype: torch.dtype) -> None:
    """`row_absmax` and `exponent` are right for every dtype; a row with NaN or inf has a NaN grid."""
    x = torch.tensor([[0.75, -3.0], [0.0, -0.0], [-1.0, 0.5], [torch.nan, 9.0], [-torch.inf, 1.0]], dtype=dtype)
    absmax = em.row_absmax(x)
    assert absmax[:3, 0].tolist() == [3.0, 0.0, 1.0]
    assert absmax[3].isnan() and absmax[4] == torch.inf
    assert em.exponent(absmax)[:3, 0].tolist() == [2, -125, 1]
    assert em.grid(absmax, 8)[3:].isnan().all()


@pytest.mark.parametrize("bits", [1, 13, 21, 26, 48])
def test_grid_rounds_as_rint_does(bits: int) -> None:
    x = torch.randn(64, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[0, :4] = torch.tensor([1.0, 2.0**-bits * 0.5, 2.0**-bits * 1.5, -(2.0**-bits) * 2.5])  # ties
    absmax = em.row_absmax(x)
    _, exponent = torch.frexp(absmax)
    c = em.grid(absmax, bits)
    assert_bitwise_equal((x + c - c) + 0.0, torch.ldexp(torch.ldexp(x, bits - exponent).round(), exponent - bits) + 0.0)


@pytest.mark.parametrize("length", [1, 511, 512, 513, 1537, 2**19])
def test_unit_sum_is_the_integer_sum(length: int) -> None:
    p = torch.rand(2, length, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    p[0] = 1.0  # 2^19 ones are 2^63
    expected = [sum(row) for row in (p * 2.0**44).round().to(torch.int64).tolist()]
    assert em.unit_total(em.unit_sum(p)).tolist() == [float(total) / 2**44 for total in expected]
    assert_bitwise_equal(em.unit_sum(p.flip(1)), em.unit_sum(p))


@pytest.mark.parametrize("parts", [1, 3, 4, 70])
def test_a_sum_of_unit_sums_is_pythons_integer_sum_rounded_once(parts: int) -> None:
    """It does not wrap where int64 would (2^19 numbers), and has `unit_total`'s bits where it would not."""
    p = torch.rand(2, 2**17, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p[0] = 1.0
    total, wrapping = em.UnitSum(), torch.zeros(2, dtype=torch.int64)
    for _ in range(parts):
        total.add(p)
        wrapping += em.unit_sum(p)
    row_sums = [sum(row) for row in (p * 2.0**44).round().to(torch.int64).tolist()]
    assert total.total().tolist() == [float(parts * row_sum) / 2**44 for row_sum in row_sums]
    assert torch.equal(em.unit_total(wrapping), total.total()) == (parts <= 4)


@pytest.mark.parametrize("parts", [1, 2, 3, 40])
def test_an_exact_sum_is_pythons_integer_sum_rounded_once(parts: int) -> None:
    rng = random.Random(parts)
    rows = [[rng.randint(-(2**53), 2**53) for _ in range(200)] for _ in range(parts)]
    rows[0][0] = rows[-1][0] = 2**53
    rows[0][1], rows[-1][1] = -(2**53), 2**53  # one part cancels another
    unit = torch.exp2(torch.randint(-60, 60, (200,), generator=torch.Generator().manual_seed(1))).double()
    total = em.ExactSum(lambda: em.grid(unit, 1))  # frexp's 2^(e-1) of a power of two is that power
    for row in rows:
        total.add(torch.tensor(row, dtype=torch.float64) * unit)
    expected = torch.tensor([float(sum(column)) for column in zip(*rows, strict=True)], dtype=torch.float64)
    assert torch.equal(total.total() / unit, expected)


@pytest.mark.parametrize("length", [1, 512, 513, 5000])
def test_a_row_sum_is_the_integer_sum_rounded_once(length: int) -> None:
    x = torch.randn(4, length, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[0] = 1.0 - 2.0**-50  # every term rounds up to 1: the largest possible sum
    x[1, : length // 2] = -x[1, length // 2 : length // 2 * 2]
    absmax = x.abs().amax(-1, keepdim=True)
    _, e = torch.frexp(absmax)
    integers = torch.ldexp(x, 44 - e).round().to(torch.int64).tolist()
    expected = torch.ldexp(torch.tensor([[float(sum(row))] for row in integers], dtype=torch.float64), e - 44)
    assert torch.equal(em.row_sum(x.clone(), em.grid(absmax, 44)), expected)
