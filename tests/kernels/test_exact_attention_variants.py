"""Exact attention with windows, softcaps and sinks is the contract's arithmetic, however it is batched and paged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact_attention
from evalengine.kernels.attention_variant import AttentionVariant
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels import exact_contract
from tests.kernels.test_exact_attention import KV_LENS, QUERY_LENS, attend, dense_batch, paged
from tests.references import reference

VARIANTS: list[dict[str, Any]] = [
    *({"window": window} for window in (1, 7, 61, 64, 1023, 1024, 1025, 5000)),
    *({"softcap": cap} for cap in (2.0, 30.0, 50.0)),
    {"sinks": True},
    {"window": 67, "softcap": 30.0, "sinks": True},
]


def name(variant: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in variant.items())


def parts(variant: dict[str, Any], heads: int) -> dict[str, Any]:
    """The arguments of `attend` for a variant."""
    others = {key: value for key, value in variant.items() if key != "sinks"}
    return {**others, "sinks": torch.linspace(-2, 3, heads).bfloat16() if "sinks" in variant else None}


def forget(sequences: list[Tensor], window: int | None) -> list[Tensor]:
    """The sequences with NaN where no query of the batch looks any more."""
    if window is None:
        return sequences
    kept = []
    for sequence, queries in zip(sequences, QUERY_LENS, strict=True):
        own = sequence.clone()
        own[: max(0, len(own) - queries + 1 - window)] = torch.nan
        kept.append(own)
    return kept


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_against_float64(variant: dict[str, Any]) -> None:
    """Within 2e-6 of float64, with NaN before every window and past every end."""
    q, k, v = dense_batch(6, 2, 48, torch.bfloat16)
    own = parts(variant, 6)
    left_k, left_v = (forget(x, variant.get("window")) for x in (k, v))
    result = attend(2 * q, left_k, left_v, QUERY_LENS, **own)
    k_pool, table = paged(k, 16, seed=1)
    v_pool, _ = paged(v, 16, seed=1)
    form = AttentionVariant(48**-0.5, **variant)
    truth = reference.paged_attention(2 * q, k_pool, v_pool, table, QUERY_LENS, KV_LENS, form, own["sinks"])
    assert (result - truth).abs().max() < 2e-6


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
@pytest.mark.parametrize("block", [5, 64])
def test_alone_as_decode_on_other_pages_and_in_other_chunks(
    variant: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the bytes of the batch when it is computed alone, as a decode, on pages of another size, over sums that
    are cut elsewhere; and with a window moved by one token, or without the softcap or the sinks, it has others."""
    q, k, v = dense_batch(4, 2, 24, torch.float16)
    own, window = parts(variant, 4), variant.get("window")
    whole = attend(q, forget(k, window), forget(v, window), QUERY_LENS, **own)
    monkeypatch.setattr(exact_attention, "CHUNK", 100)
    monkeypatch.setattr(exact_attention, "_TILE", 3000)
    monkeypatch.setattr(exact_attention, "_GROUP_ELEMENTS", 100_000)
    assert_bitwise_equal(attend(q, k, v, QUERY_LENS, block, **own), whole)
    start = 0
    for s, queries in enumerate(QUERY_LENS):
        for row in {0, queries // 2, queries - 1} if queries else set():
            seen = KV_LENS[s] - queries + row + 1
            alone = attend(q[start + row][None], [k[s][:seen]], [v[s][:seen]], [1], block, **own)
            assert_bitwise_equal(alone[0], whole[start + row])
        start += queries
    if window != 5000:
        other = {"window": window + 1} if window else {}
        assert count_differing(attend(q, k, v, QUERY_LENS, block, **other), whole) > 0


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
@pytest.mark.parametrize("length", [1, 63, 1025, 2500])
def test_it_is_the_contracts_arithmetic(length: int, variant: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, 1, 24, generator=generator) * 9
    k, v = (torch.randn(length, 1, 24, generator=generator) for _ in range(2))
    v *= torch.exp2(torch.randint(-9, 9, (length, 1, 1), generator=generator))
    own = parts(variant, 1)
    result = attend(q, [k], [v], [1], **own)
    seen = slice(max(0, length - variant.get("window", length)), length)
    sink = own["sinks"][0].item() if own["sinks"] is not None else float("-inf")
    expected = exact_contract.attention_row(q[0, 0], k[seen, 0], v[seen, 0], 24**-0.5, variant.get("softcap"), sink)
    assert_bitwise_equal(result[0, 0], expected)


def test_a_bad_token_spoils_only_the_rows_whose_window_holds_it() -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(40, 2, 8, generator=generator)
    k, v = (torch.randn(40, 1, 8, generator=generator) for _ in range(2))
    clean = attend(q, [k], [v], [40], window=5)
    for which in (0, 1):
        spoilt = [k.clone(), v.clone()]
        spoilt[which][20, 0, 3] = torch.nan
        out = attend(q, [spoilt[0]], [spoilt[1]], [40], window=5)
        assert out[20:25].isnan().any(-1).all()
        assert_bitwise_equal(torch.cat([out[:20], out[25:]]), torch.cat([clean[:20], clean[25:]]))


def test_sinks_take_weight_and_give_no_value() -> None:
    """A sink of -inf changes no bit, a huge one leaves zeros, and a NaN reaches its own head alone."""
    q, k, v = dense_batch(3, 1, 16, torch.bfloat16)
    plain = attend(q, k, v, QUERY_LENS)
    out = attend(q, k, v, QUERY_LENS, sinks=torch.tensor([-torch.inf, 1e4, torch.nan]))
    assert_bitwise_equal(out[:, 0], plain[:, 0])
    assert_bitwise_equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert out[:, 2].isnan().all()


def test_a_long_prompts_tiles_compute_their_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of a prefill of 2,000 tokens with a window of 20 are those of its windows, not of its square."""
    columns = 0
    real = exact_attention.product

    def product(limbs: Tensor, absmax: Tensor, right: Tensor, unit: Tensor) -> Tensor:
        nonlocal columns
        columns += limbs.shape[-2] * right.shape[-1]
        return real(limbs, absmax, right, unit)

    monkeypatch.setattr(exact_attention, "product", product)
    monkeypatch.setattr(exact_attention, "CHUNK", 64)
    monkeypatch.setattr(exact_attention, "_TILE", 1280)  # 20 rows
    q, k, v = torch.randn(2000, 1, 8), torch.randn(2000, 1, 8), torch.randn(2000, 1, 8)
    attend(q, [k], [v], [2000], window=20)
    assert columns < 2000 * (20 + 20 + 64)
