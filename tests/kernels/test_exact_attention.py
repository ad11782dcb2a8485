"""Exact paged attention is the contract's arithmetic, close to float64, and independent of batching and paging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact_attention
from evalengine.kernels.attention_variant import AttentionVariant
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels import exact_contract
from tests.references import reference

KV_LENS = [1, 70, 64, 65, 33, 1300, 1025, 2051]
QUERY_LENS = [1, 1, 64, 3, 0, 1, 40, 1]


def dense_batch(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the batch's queries [tokens, heads, dim], and each sequence's keys and values [L, kv_heads, dim]."""
    generator = torch.Generator().manual_seed(heads * dim)
    q = torch.randn(sum(QUERY_LENS), heads, dim, generator=generator)
    k, v = ([torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in KV_LENS] for _ in range(2))
    return q, k, v


def paged(sequences: list[Tensor], block: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scatters sequences over a pool full of NaN; returns the pool and the block table, padded with page 0."""
    counts = [-(-len(s) // block) for s in sequences]
    pages = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))
    pool = torch.full((len(pages), block, *sequences[0].shape[1:]), torch.nan, dtype=sequences[0].dtype)
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    for s, sequence in enumerate(sequences):
        own_pages = pages[sum(counts[:s]) : sum(counts[: s + 1])]
        table[s, : counts[s]] = own_pages.int()
        for number, page in enumerate(own_pages.tolist()):
            rows = sequence[number * block : (number + 1) * block]
            pool[page, : len(rows)] = rows
    return pool, table


def attend(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    queries: list[int],
    block: int = 16,
    sinks: Tensor | None = None,
    **variant: Any,
) -> Tensor:
    """Returns exact attention of the queries over sequences that are scattered over pages of `block` slots.

    variant: the fields of an `AttentionVariant` beside its scale and sinks.
    """
    k_pool, table = paged(k, block, seed=1)
    v_pool, _ = paged(v, block, seed=1)
    lens = [len(s) for s in k]
    form = AttentionVariant(q.shape[-1] ** -0.5, **variant, sinks=sinks is not None)
    return exact_attention.paged_attention(q, k_pool, v_pool, table, queries, lens, form, sinks)


SHAPES = [(9, 3, 64, torch.bfloat16), (4, 4, 48, torch.float32), (8, 1, 128, torch.float16)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), SHAPES)
def test_against_float64(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Attention is within 2e-6 of float64."""
    q, k, v = dense_batch(heads, kv_heads, dim, dtype)
    result = attend(q, k, v, QUERY_LENS)
    k_pool, table = paged(k, 16, seed=1)
    v_pool, _ = paged(v, 16, seed=1)
    truth = reference.paged_attention(q, k_pool, v_pool, table, QUERY_LENS, KV_LENS, AttentionVariant(dim**-0.5))
    assert result.dtype == torch.float32
    assert (result - truth).abs().max() < 2e-6


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), SHAPES)
@pytest.mark.parametrize("block", [5, 64])
def test_alone_as_decode_and_on_other_pages(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, block: int
) -> None:
    """A row has the bytes of the batch when it is computed alone, as a decode, on pages of another size."""
    q, k, v = dense_batch(heads, kv_heads, dim, dtype)
    whole = attend(q, k, v, QUERY_LENS)
    start = 0
    for s, queries in enumerate(QUERY_LENS):
        for row in {0, queries // 2, queries - 1} if queries else set():
            seen = KV_LENS[s] - queries + row + 1
            alone = attend(q[start + row][None], [k[s][:seen]], [v[s][:seen]], [1], block)
            assert_bitwise_equal(alone[0], whole[start + row])
        start += queries


@pytest.mark.parametrize("cut", [1, 64, 700, 1024, 1099])
def test_chunked_prefill_equals_prefill(cut: int) -> None:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1100, 4, 32, generator=generator)
    k, v = (torch.randn(1100, 2, 32, generator=generator).bfloat16() for _ in range(2))
    whole = attend(q, [k], [v], [1100])
    parts = [attend(q[:cut], [k[:cut]], [v[:cut]], [cut]), attend(q[cut:], [k], [v], [1100 - cut])]
    assert_bitwise_equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("tile", "group"), [(1, 1), (3000, 100_000), (10**7, 10**9)])
def test_tiles_groups_and_chunks_change_nothing(tile: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = dense_batch(6, 2, 16, torch.bfloat16)
    before = attend(q, k, v, QUERY_LENS)
    monkeypatch.setattr(exact_attention, "_TILE", tile)
    monkeypatch.setattr(exact_attention, "_GROUP_ELEMENTS", group)
    monkeypatch.setattr(exact_attention, "CHUNK", 100)
    assert_bitwise_equal(attend(q, k, v, QUERY_LENS), before)


@pytest.mark.parametrize("length", [1, 2, 63, 1024, 1025, 2500])
def test_attention_is_the_contracts_arithmetic(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, 1, 24, generator=generator) * 3
    k, v = (torch.randn(length, 1, 24, generator=generator) for _ in range(2))
    v *= torch.exp2(torch.randint(-9, 9, (length, 1, 1), generator=generator))
    result = attend(q, [k], [v], [1])
    assert_bitwise_equal(result[0, 0], exact_contract.attention_row(q[0, 0], k[:, 0], v[:, 0], 24**-0.5))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_bad_token_spoils_only_the_rows_that_see_it(which: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(40, 2, 8, generator=generator)
    k, v = (torch.randn(40, 1, 8, generator=generator) for _ in range(2))
    clean = attend(q, [k, k], [v, v], [20, 20])
    spoilt_k, spoilt_v = k.clone(), v.clone()
    (spoilt_k if which == "k" else spoilt_v)[30, 0, 3] = bad
    spoilt = attend(q, [spoilt_k, k], [spoilt_v, v], [20, 20])
    assert spoilt[10:20].isnan().any(-1).all()
    assert_bitwise_equal(spoilt[:10], clean[:10])
    assert_bitwise_equal(spoilt[20:], clean[20:])


def test_zero_keys_values_and_queries() -> None:
    """Zero queries and keys give the values' mean, and zero values give 0, never -0 or NaN."""
    q, zeros = torch.zeros(3, 2, 8), torch.zeros(5, 1, 8)
    assert_bitwise_equal(attend(q, [zeros], [-zeros], [3]), torch.zeros(3, 2, 8))
    ones = torch.ones(5, 1, 8)
    assert_bitwise_equal(attend(q, [zeros], [ones], [3]), torch.ones(3, 2, 8))


def test_torch_attention_does_depend_on_the_query_tile() -> None:
    """torch's attention gives a row alone other bits than in the batch, so that the tests above can fail."""
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(1, 4, 300, 64, generator=generator) for _ in range(3))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    differing = 0
    for row in range(0, 300, 23):
        seen = slice(0, row + 1)
        alone = torch.nn.functional.scaled_dot_product_attention(q[:, :, row : row + 1], k[:, :, seen], v[:, :, seen])
        differing += count_differing(alone[0, :, 0], whole[0, :, row])
    assert differing


def test_more_than_2_to_the_19_keys() -> None:
    """786,432 equal keys give the value that each has: a sum of so many 2^44 does not fit int64."""
    length = 3 << 18
    keys, values = torch.zeros(length, 1, 2), torch.full((length, 1, 2), 2.0)
    values[::2] = torch.tensor([1.0, 3.0])
    result = attend(torch.ones(1, 1, 2), [keys], [values], [1], 4096)
    assert_bitwise_equal(result, torch.tensor([[[1.5, 2.5]]]))
