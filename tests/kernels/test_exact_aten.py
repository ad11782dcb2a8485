"""The CPU arithmetic of batch-invariant mode equals an independent version in integers and is close to float64."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction

import pytest
import torch

from evalengine.kernels import exact, exact_aten, exact_aten_rows
from tests.bitwise import assert_bitwise_equal
from tests.random_tensors import randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def float32(x: float) -> float:
    """Rounds to float32; subnormals and -0 become +0."""
    y = struct.unpack("f", struct.pack("f", x))[0]
    return y if abs(x) >= 2.0**-126 else 0.0


def nearest_even(x: Fraction) -> int:
    return round(x)  # Python rounds a Fraction's ties to even


def exponent(x: float) -> int:
    """Returns the e for which x = f * 2^e with f in [0.5, 1), at least -125, and -125 for zero."""
    return max(math.frexp(x)[1], -125) if x else -125


def product_in_integers(a: list[float], b: list[float]) -> float:
    """Computes one element of NUMERICS.md's product, of a row and a column, in Python's integers and fractions."""
    terms = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True) if x]
    if not terms:
        return 0.0
    e_a = exponent(max(abs(float(x)) for x, _ in terms))
    e_b = -(-exponent(max(abs(float(y)) for _, y in terms)) // 4) * 4
    unit_a, unit_b = Fraction(2) ** (e_a - 14), Fraction(2) ** (e_b - 26)
    hi_sum = lo_sum = 0
    for x, y in terms:
        hi = nearest_even(x / unit_a)
        lo = nearest_even((x / unit_a - hi) * 2**15)
        q = nearest_even(y / unit_b)
        hi_sum, lo_sum = hi_sum + hi * q, lo_sum + lo * q
    return float32(float(hi_sum * unit_a * unit_b) + float(lo_sum * unit_a * unit_b / 2**15))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.95])
def test_products_against_integers(zeros: float, dtype: torch.dtype) -> None:
    """Products, single and batched, with zeros or without, have the bytes of `product_in_integers`."""
    spread = 2.0 ** torch.randint(-9, 10, (60, 1), generator=torch.Generator().manual_seed(3))
    a, b = randn(5, 60, dtype=dtype), (randn(60, 7, seed=1) * spread).to(dtype)
    a = a.masked_fill(torch.rand(5, 60, generator=torch.Generator().manual_seed(2)) < zeros, 0)
    a[4] = 0
    truth = [[product_in_integers(row, column) for column in b.t().tolist()] for row in a.tolist()]
    assert_bitwise_equal(exact_aten.product(a, exact_aten.prepare(b)), torch.tensor(truth))
    assert_bitwise_equal(exact_aten.batched_product(a[None], b[None])[0], torch.tensor(truth))


def test_long_products_against_integers() -> None:
    """Products of more than 8192 terms are cut into segments, which leave no trace in the bytes."""
    a, b = randn(2, 17_000), randn(17_000, 3, seed=1)
    truth = [[product_in_integers(row, column) for column in b.t().tolist()] for row in a.tolist()]
    product = exact_aten.product(a, exact_aten.prepare(b))
    assert_bitwise_equal(product, torch.tensor(truth))
    order = torch.randperm(17_000, generator=torch.Generator().manual_seed(0))
    assert_bitwise_equal(exact_aten.product(a[:, order], exact_aten.prepare(b[order])), product)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_against_float64(dtype: torch.dtype) -> None:
    """Products are closer to float64 than torch's float32, with a few operands a thousand times the others."""
    a, b = randn(40, 900, dtype=dtype), (randn(900, 50, seed=1) * 0.02).to(dtype)
    a[:, ::300] *= 1000
    truth = a.double() @ b.double()
    torch_error = ((a.float() @ b.float()).double() - truth).abs().max()
    exact_error = (exact_aten.product(a, exact_aten.prepare(b)).double() - truth).abs().max()
    assert exact_error < torch_error


def test_extreme_magnitudes() -> None:
    """Tiny and huge operands give the integer product, subnormal ones count as 0, and sums overflow to inf."""
    tiny, huge = torch.tensor([[1e-38, 2e-37, 0.0]]), torch.tensor([[3e38, -3e38, 1.0]])
    subnormal = torch.tensor([[1e-40, 2e-37, -1e-39]])
    for a, b in [(tiny, huge), (huge, tiny), (tiny, tiny), (subnormal, huge), (huge, subnormal)]:
        product = exact_aten.product(a, exact_aten.prepare(b.t()))
        flushed = [[x if abs(x) >= 2.0**-126 else 0.0 for x in y[0].tolist()] for y in (a, b)]
        assert product.item() == product_in_integers(*flushed)
    assert exact_aten.product(huge, exact_aten.prepare(huge.t())).item() == math.inf


def test_infinities_and_nan_stay_in_their_row_and_column() -> None:
    a, b = randn(4, 9000), randn(9000, 5, seed=1)
    for k in (7, 8999):
        for value in (math.nan, math.inf, -math.inf):
            for terms in (60, 9000):
                left, right = a[:, -terms:].clone(), b[-terms:].clone()
                whole = exact_aten.product(left, exact_aten.prepare(right))
                left[1, k % terms] = value
                left[2, k % terms] = 0  # 0 * NaN is NaN, as in torch
                right[k % terms, 3] = value
                spoilt = exact_aten.product(left, exact_aten.prepare(right))
                assert spoilt[1].isnan().all() and spoilt[:, 3].isnan().all()
                left[2, k % terms] = a[2, -terms:][k % terms]
                again = exact_aten.product(left, exact_aten.prepare(right))
                others = [0, 1, 2, 4]
                assert_bitwise_equal(again[[0, 2, 3]][:, others], whole[[0, 2, 3]][:, others])


def test_products_have_these_bits_on_every_machine() -> None:
    """A digest over products and row reductions is the same everywhere; torch's generator has no part in the inputs."""
    index = torch.arange(6 * 700)
    a = ((index * 7919 % 65_537 - 32_768).float() / 4096).view(6, 700)
    b = ((index * 104_729 % 65_521 - 32_760).float() / 65_536).view(700, 6) * 2.0 ** (index.view(700, 6) % 23 - 11)
    a = a.masked_fill((index % 3 == 0).view(6, 700), 0)
    a[:, 100:] *= index[:600] % 5 > 3
    out = exact_aten.product(a, exact_aten.prepare(b))
    rows = [
        exact_aten_rows.sums(a),
        exact_aten_rows.norms(b, 2),
        *exact_aten_rows.moments(a, 1, True),
        exact_aten_rows.logsumexp(b),
    ]
    rows += [exact.elementwise(exact_aten_rows.gelu, a), exact_aten_rows.normalize(a, None, None, 1e-5)[0]]
    digest = hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in (out, *rows))).hexdigest()
    assert digest == "52741bb32f6b3dda9bd682b168f775d4951eefba9c645fe03ce3eaedb1704059"


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_reductions_against_float64(dtype: torch.dtype) -> None:
    """Sums, norms, logsumexp, moments and layer norm are within 2e-7 of float64."""
    x = (randn(7, 20_000) * 3 + 1).to(dtype)
    wide = x.double()
    tolerance = {"rtol": 2e-7, "atol": 0}
    torch.testing.assert_close(exact_aten_rows.sums(x).double(), wide.sum(-1), **tolerance)
    torch.testing.assert_close(exact_aten_rows.norms(x, 1).double(), wide.norm(1, -1), **tolerance)
    torch.testing.assert_close(exact_aten_rows.norms(x, 2).double(), wide.norm(2, -1), **tolerance)
    torch.testing.assert_close(exact_aten_rows.logsumexp(x).double(), wide.logsumexp(-1), **tolerance)
    for root in (False, True):
        spread, mean = exact_aten_rows.moments(x, 1, root)
        torch.testing.assert_close(spread.double(), wide.std(-1) if root else wide.var(-1), **tolerance)
        torch.testing.assert_close(mean.double(), wide.mean(-1), **tolerance)
    out, _, _ = exact_aten_rows.normalize(x, None, None, 1e-5)
    torch.testing.assert_close(out.double(), torch.nn.functional.layer_norm(wide, (20_000,)), rtol=2e-7, atol=2e-7)


def test_sums_longer_than_one_int64() -> None:
    """A sum of more than MAX_TERMS terms, too many for one int64, is exact."""
    x = torch.ones(1, exact_aten_rows.MAX_TERMS + 5)
    x[0, -1] = 3
    assert exact_aten_rows.sums(x).item() == float(exact_aten_rows.MAX_TERMS + 7)


def test_infinities_in_row_reductions() -> None:
    """Rows with infinities or NaN give what torch gives."""
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1, inf, 2], [-inf, -inf, -inf], [inf, -inf, 0], [nan, 1, 2], [0, 0, 0], [1e38, 1e38, 3e38]])
    torch.testing.assert_close(exact_aten_rows.sums(x), x.sum(-1), equal_nan=True)
    torch.testing.assert_close(exact_aten_rows.logsumexp(x), x.logsumexp(-1), equal_nan=True)
    torch.testing.assert_close(exact_aten_rows.norms(x, 1), x.norm(1, -1), equal_nan=True)


def test_gelu_against_mpmath() -> None:
    """Both forms of GELU are within 2^-23.5 of mpmath."""
    mpmath = pytest.importorskip("mpmath")
    x = torch.cat((torch.linspace(-13, 13, 401), torch.tensor([1e-30, -1e-6, 1e-3, -14.1, 30.0])))
    erf = exact.elementwise(exact_aten_rows.gelu, x).tolist()
    tanh = exact.elementwise(exact_aten_rows.gelu_tanh, x).tolist()
    for value, erf_form, tanh_form in zip(x.tolist(), erf, tanh, strict=True):
        v = mpmath.mpf(value)
        truth = v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2
        assert abs(erf_form - truth) <= max(abs(truth) * 2.0**-23.5, 2.0**-126)
        u = mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)
        truth = v / (1 + mpmath.exp(-2 * u))
        assert abs(tanh_form - truth) <= max(abs(truth) * 2.0**-23.5, 2.0**-126)
