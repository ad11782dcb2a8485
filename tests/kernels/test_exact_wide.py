"""Rows that one limb of 26 bits does not hold: weights, keys and values whose numbers spread over many powers of two.

Multiplying a channel of one operand by a power of two, and of the other by its inverse, changes no bit of float32
products. So `exact` must stay as close to float64 as it is without.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact, exact_attention, exact_math, exact_product, exact_wide
from evalengine.kernels import exact_math as em
from evalengine.kernels.attention_variant import AttentionVariant
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels import exact_contract
from tests.random_tensors import randn
from tests.references import reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SPREADS = [0, 8, 10, 16, 24]


def exponents(channels: int, spread: int, seed: int = 0) -> Tensor:
    """A power of two for each channel, from 0 to `spread`, whose first and last are the ends."""
    powers = torch.randint(0, spread + 1, (channels,), generator=torch.Generator().manual_seed(seed))
    powers[0], powers[-1] = 0, spread
    return powers


def spread_pair(m: int, n: int, k: int, spread: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, k] and weight [n, k]: normal numbers, channels scaled by powers of two and by their inverses."""
    powers = exponents(k, spread)
    weight = randn(n, k, seed=1).to(dtype).float() * 2.0**10  # fp16 would have no room below
    return torch.ldexp(randn(m, k), powers), torch.ldexp(weight, -powers).to(dtype)


def is_wide(x: Tensor) -> Tensor:
    found = torch.zeros(x.shape[:-1].numel(), dtype=torch.bool)
    found[exact_wide.wide_rows(x, em.magnitude(x), em.row_absmax(x))] = True
    return found.view(x.shape[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 16, 64, 577])
def test_which_rows_are_wide_is_the_contracts_rule(columns: int, dtype: torch.dtype) -> None:
    """The quick filter before the rule leaves no row out, whatever its numbers, its zeros and its axis order."""
    rows = torch.ldexp(randn(300, columns), -exponents(columns, 14)).to(dtype)
    rows[::3] = randn(100, columns).to(dtype)
    rows[1::4] *= torch.exp2(torch.linspace(-20, 10, 75)).unsqueeze(1).to(dtype)
    rows[::5, :: columns // 3 + 1] = 0.0
    rows[7], rows[8, 0], rows[9, -1] = 0.0, torch.inf, torch.nan
    rows[10] *= 2.0**-130 if dtype == torch.float32 else 1.0
    expected = exact_contract.wide_rows(rows)
    assert_bitwise_equal(is_wide(rows), expected)
    assert columns < 64 or 10 < int(expected.sum()) < 290
    strided = rows.view(30, 10, columns).transpose(0, 1)
    assert_bitwise_equal(is_wide(strided), expected.view(30, 10).t().contiguous())


def test_the_bound_is_where_the_contract_has_it() -> None:
    """At the bound itself a row is not wide, and a row of which the limb loses nothing has a higher one."""
    lossy = 0.5 * (1 + 2.0**-23)
    at_bound = torch.tensor([[lossy, *[lossy * 2.0**-6] * 6, lossy * 2.0**-8]])  # (1 + 6 * 8 + 16) / 8 = 65 / 8
    assert is_wide(at_bound).all()
    assert not is_wide(at_bound[:, [0, 1, 1, 1, 1, 1, 1, 1]]).any()  # (1 + 7 * 8) / 8
    exactly = torch.tensor([[lossy, lossy * 2.0**-6, *[lossy * 2.0**-6] * 6, lossy * 2.0**-7]])  # (1 + 8 * 8) / 9
    assert not is_wide(exactly).any()
    lossless = torch.tensor([[0.5, 2.0**-20]])  # (1 + 128) / 2, 19 powers of two apart
    assert is_wide(lossless).all()
    assert not is_wide(torch.tensor([[0.5, 2.0**-20, 0.5, 0.5]])).any()  # (3 + 128) / 4
    assert not is_wide(torch.tensor([[0.5, 2.0**-19]])).any()  # 18 apart
    assert is_wide(torch.cat((lossless, torch.zeros(1, 9)), 1)).all()
    assert_bitwise_equal(is_wide(at_bound * 2.0**-100), is_wide(at_bound))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 17, 31), (5, 33, 577), (2, 3, 8193)])
@pytest.mark.parametrize("spread", [10, 14, 24])
def test_products_are_the_contracts(m: int, n: int, k: int, spread: int, dtype: torch.dtype) -> None:
    x, weight = spread_pair(m, n, k, min(spread, 14) if dtype == torch.float16 else spread, dtype)
    expected = exact_contract.linear(x, weight)
    assert_bitwise_equal(exact.linear(x, exact.quantize_weight(weight)), expected)
    assert_bitwise_equal(exact.bmm(x[None], weight.t()[None])[0], expected)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(7, 33, 65), (16, 100, 577), (3, 21, 1537)])
def test_products_against_float64(m: int, n: int, k: int, dtype: torch.dtype, spread: int) -> None:
    """Every row (L2) is within 5e-7 of float64, most are within 4e-8; float32 products are within 2e-7 to 4e-7."""
    x, weight = spread_pair(m, n, k, spread, dtype)
    truth = reference.linear(x, weight)
    error = (exact.linear(x, exact.quantize_weight(weight)) - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() <= 6e-7
    plain = (torch.nn.functional.linear(x, weight.float()) - truth).norm(dim=1) / truth.norm(dim=1)
    assert plain.max() <= 1e-6  # the problem is a fair one: float32 arithmetic does not mind the spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [14, 24])
def test_one_channel_in_ten_far_below_the_others(spread: int, dtype: torch.dtype) -> None:
    x, weight = randn(9, 577), randn(40, 577, seed=1).to(dtype)
    x[:, ::10] *= 2.0**spread
    weight[:, ::10] *= 2.0**-spread
    truth = reference.linear(x, weight)
    error = (exact.linear(x, exact.quantize_weight(weight)) - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() <= (2e-6 if spread == 14 else 1e-7)  # by contract 2: from 4e-5 on


def attend(q: Tensor, k: Tensor, v: Tensor, lens: list[int], queries: list[int], block: int = 16) -> Tensor:
    """Exact attention; k and v [sequences, L, Hkv, D], cut into pages of `block` in a shuffled pool full of NaN."""
    sequences, longest = k.shape[:2]
    pages = -(-longest // block)
    order = torch.randperm(sequences * pages, generator=torch.Generator().manual_seed(block))
    table = order.view(sequences, pages).int()
    pools = []
    for x in (k, v):
        padded = torch.full((sequences, pages * block, *x.shape[2:]), torch.nan, dtype=x.dtype)
        for s, length in enumerate(lens):
            padded[s, :length] = x[s, :length]
        pool = torch.empty(sequences * pages, block, *x.shape[2:], dtype=x.dtype)
        pool[order] = padded.view(-1, block, *x.shape[2:])
        pools.append(pool)
    return exact_attention.paged_attention(q, *pools, table, queries, lens, AttentionVariant(q.shape[-1] ** -0.5))


def wide_batch(spread: int, dtype: torch.dtype, dim: int = 40) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Three sequences, 4 query and 2 KV heads: q's and k's channels scaled against each other, v's scaled down. Every
    third key and value is an ordinary one."""
    lens, queries = [70, 1100, 33], [70, 3, 1]
    powers, down = exponents(dim, spread), exponents(dim, spread, seed=1)
    k, v = (randn(3, 1100, 2, dim, seed=seed).to(dtype) for seed in (3, 4))
    q = torch.ldexp(randn(sum(queries), 4, dim, seed=2), powers)
    k = torch.ldexp(k.float(), -powers).to(dtype)
    v = torch.ldexp(v.float(), -down).to(dtype)
    return q, k, v, lens, queries


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [40, 127])
def test_attention_against_float64(dim: int, dtype: torch.dtype, spread: int) -> None:
    """Every channel is within 8e-7 of float64, most are within 2e-7, of values of about 1 before they were scaled;
    float32 attention is within 1e-6."""
    q, k, v, lens, queries = wide_batch(spread, dtype, dim + dim % 2)
    q, k, v = (x[..., :dim] for x in (q, k, v))
    powers = exponents(dim + dim % 2, spread, seed=1)[:dim]
    table = torch.arange(3)[:, None]
    truth = reference.paged_attention(q, k, v, table, queries, lens, AttentionVariant(dim**-0.5))
    error = torch.ldexp((attend(q, k, v, lens, queries) - truth).abs(), powers)
    assert error.max() <= 2e-6


@pytest.mark.parametrize("length", [1, 63, 1025])
@pytest.mark.parametrize("spread", [10, 24])
def test_attention_is_the_contracts_arithmetic(length: int, spread: int) -> None:
    q, k, v, *_ = wide_batch(spread, torch.float32)
    k[:, ::3], v[:, 1::3] = randn(3, 1100, 2, 40, seed=5)[:, ::3] * 1e-3, randn(3, 1100, 2, 40, seed=6)[:, 1::3]
    result = attend(q[:1], k[:1], v[:1], [length], [1])
    for head in range(4):
        keys, values = k[0, :length, head // 2], v[0, :length, head // 2]
        assert_bitwise_equal(result[0, head], exact_contract.attention_row(q[0, head], keys, values, 40**-0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_batch_pages_chunks_or_later_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, lens, queries = wide_batch(16, dtype)
    k[:, ::3], v[:, 1::3] = (x[:, : -(-1100 // 3)] for x in (randn(3, 400, 2, 40).to(dtype),) * 2)
    k[0, :20], v[0, :30] = (randn(30, 2, 40, seed=seed).to(dtype)[:n] for seed, n in ((7, 20), (8, 30)))
    assert is_wide(k).any() and not is_wide(k).all() and is_wide(v).any() and not is_wide(v).all()
    whole = attend(q, k, v, lens, queries)
    for block in (5, 64):
        assert_bitwise_equal(attend(q, k, v, lens, queries, block), whole)
    for row in (0, 19, 20, 45, 69):  # of the first sequence, alone and as a decode
        assert_bitwise_equal(attend(q[row : row + 1], k[:1], v[:1], [row + 1], [1])[0], whole[row])
    for cut in (1, 20, 37):  # chunked prefill
        parts = [attend(q[:cut], k[:1], v[:1], [cut], [cut]), attend(q[cut:70], k[:1], v[:1], [70], [70 - cut])]
        assert_bitwise_equal(torch.cat(parts), whole[:70])
    assert_bitwise_equal(attend(q[70:73], k[1:2], v[1:2], [1100], [3]), whole[70:73])
    for heads in (slice(0, 1), slice(1, 2)):  # ranks
        own = attend(q[:, 2 * heads.start : 2 * heads.stop], k[:, :, heads], v[:, :, heads], lens, queries)
        assert_bitwise_equal(own, whole[:, 2 * heads.start : 2 * heads.stop].contiguous())
    monkeypatch.setattr(exact_attention, "_TILE", 500)
    monkeypatch.setattr(exact_attention, "_GROUP_ELEMENTS", 3000)
    monkeypatch.setattr(exact_attention, "CHUNK", 100)
    monkeypatch.setattr(exact_math, "TILE", 1000)
    assert_bitwise_equal(attend(q, k, v, lens, queries), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_depends_on_its_own_row_of_the_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on other rows, wide or not, nor on the batch, the order of K, zeros in it, tiles or threads."""
    x, weight = spread_pair(150, 60, 1100, 12, dtype)
    weight[::4] = randn(15, 1100, seed=9).to(dtype)
    assert is_wide(weight).any() and not is_wide(weight).all()
    bias = randn(60, seed=3)
    whole = exact.linear(x, exact.quantize_weight(weight), bias)
    for rows in (slice(0, 1), slice(1, 2), slice(7, 40)):  # ranks
        part = exact.linear(x, exact.quantize_weight(weight[rows]), bias[rows])
        assert_bitwise_equal(part, whole[:, rows].contiguous())
        assert_bitwise_equal(exact.linear(x[rows], exact.quantize_weight(weight), bias), whole[rows])
    order = torch.randperm(1400, generator=torch.Generator().manual_seed(1))
    shuffled, weights = (torch.cat((m, torch.zeros(len(m), 300, dtype=m.dtype)), 1)[:, order] for m in (x, weight))
    assert_bitwise_equal(exact.linear(shuffled, exact.quantize_weight(weights), bias), whole)
    for name, value in (("_ROW_BLOCK", 7), ("_PRODUCT_ELEMENTS", 100)):
        monkeypatch.setattr(exact, name, value)
    monkeypatch.setattr(exact_math, "TILE", 1000)
    monkeypatch.setattr(exact_product, "SEGMENT", 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        assert_bitwise_equal(exact.linear(x, exact.quantize_weight(weight), bias), whole)
    finally:
        torch.set_num_threads(threads)


def test_plain_arithmetic_does_depend_on_the_batch_and_the_order() -> None:
    """Even in float64 the order of such sums shows in float32, so that the tests above can fail."""
    x, weight = spread_pair(64, 60, 1100, 12, torch.float32)
    whole = torch.nn.functional.linear(x, weight)
    assert any(count_differing(torch.nn.functional.linear(x[:m], weight), whole[:m]) for m in (1, 2, 7, 33))
    assert count_differing((x.flip(1) @ weight.flip(1).t()), x @ weight.t())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_beside_wide_rows(bad: float) -> None:
    x, weight = spread_pair(5, 9, 70, 16, torch.float32)
    clean = exact.linear(x, exact.quantize_weight(weight))
    x[2, 20], weight[3, 5] = bad, bad
    spoilt = exact.linear(x, exact.quantize_weight(weight))
    assert spoilt[2].isnan().all() and spoilt[:, 3].isnan().all()
    fine = [0, 1, 3, 4], [0, 1, 2, 4, 5, 6, 7, 8]
    assert_bitwise_equal(spoilt[fine[0]][:, fine[1]], clean[fine[0]][:, fine[1]])
    q, k, v, *_ = wide_batch(16, torch.float32)
    clean = attend(q[:40], k[:1], v[:1], [40], [40])
    for x in (k, v):
        x[0, 25, 1, 3] = bad
    spoilt = attend(q[:40], k[:1], v[:1], [40], [40])
    assert spoilt[25:, 2:].isnan().any(-1).all()
    assert_bitwise_equal(spoilt[:25], clean[:25])
    assert_bitwise_equal(spoilt[:, :2].contiguous(), clean[:, :2].contiguous())
