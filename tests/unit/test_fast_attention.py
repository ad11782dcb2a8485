"""The attention of the fast level on a CPU against float64, over pools that hold NaN where no query looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers import create_ops, fast_attention
from evalengine.layers.metadata import AttentionMetadata
from tests.bitwise import count_differing
from tests.kernels.paged_batch import PagedBatch

CPU = torch.device("cpu")
FAST = create_ops("fast", torch.float32, CPU)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention in float64 for the last len(q) of len(k) tokens: [Q, Hq, D], [L, Hkv, D] -> [Q, Hq, D]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    last = torch.arange(len(k) - len(q), len(k))
    scores.masked_fill_(torch.arange(len(k)) > last[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("small_groups", [False, True])
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_fast_attention(block_size: int, small_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is float64's within rounding, whatever stale pages hold."""
    if small_groups:
        monkeypatch.setattr(fast_attention, "GROUP_TOKENS", 100)
    torch.manual_seed(block_size)
    kv_heads, heads, head_dim = 2, 6, 48
    lens = [(1, 1), (1, 65), (1, 97), (1, 66), (3, 3), (2, 64), (65, 65), (17, 129), (0, 5), (31, 37)]
    tokens = [torch.randn(2, kv_len, kv_heads, head_dim) for _, kv_len in lens]
    q = torch.randn(sum(n for n, _ in lens), heads, head_dim)
    outputs = []
    for stale in (0.0, float("nan")):
        order = torch.randperm(700, generator=torch.Generator().manual_seed(3)).tolist()
        k_cache, v_cache = torch.full((2, 700, block_size, kv_heads, head_dim), stale)
        table = torch.zeros(len(lens), 130, dtype=torch.int32)
        for s, (_, kv_len) in enumerate(lens):
            pages = [order.pop() for _ in range(-(-kv_len // block_size))]
            table[s, : len(pages)] = torch.tensor(pages)
            slots = torch.tensor([pages[i // block_size] * block_size + i % block_size for i in range(kv_len)])
            FAST.store_kv(tokens[s][0], tokens[s][1], (k_cache, v_cache), slots)
        metadata = AttentionMetadata(
            slot_mapping=torch.empty(0, dtype=torch.int64),
            cu_seqlens_q=torch.tensor([0] + [n for n, _ in lens]).cumsum(0).int(),
            seqlens_k=torch.tensor([kv_len for _, kv_len in lens], dtype=torch.int32),
            block_table=table,
            query_lens=[n for n, _ in lens],
            kv_lens=[kv_len for _, kv_len in lens],
        )
        outputs.append(FAST.attention(q, (k_cache, v_cache), metadata, AttentionVariant(0.17)))
    assert count_differing(outputs[0], outputs[1]) == 0, "a stale page reached the output"
    rows = q.split([n for n, _ in lens])
    expected = torch.cat([naive_attention(r, t[0], t[1], 0.17) for r, t in zip(rows, tokens, strict=True)])
    torch.testing.assert_close(outputs[1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small_groups", [False, True])
@pytest.mark.parametrize(
    "variant",
    [
        *({"window": window} for window in (1, 7, 61, 64, 65, 500)),
        *({"softcap": cap} for cap in (2.0, 50.0)),
        {"sinks": True},
        {"window": 13, "softcap": 30.0, "sinks": True},
    ],
    ids=str,
)
def test_fast_attention_with_windows_softcaps_and_sinks(
    variant: dict[str, Any], small_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within rounding of float64, though every slot before the windows and past the ends holds NaN."""
    if small_groups:
        monkeypatch.setattr(fast_attention, "GROUP_TOKENS", 100)
        monkeypatch.setattr(fast_attention, "GROUP_SCORES", 3000)
    lens = [(1, 1), (1, 65), (1, 97), (3, 3), (2, 64), (65, 65), (17, 129), (31, 37)]
    for page in (5, 64):
        batch = PagedBatch.random(lens, 6, 2, 48, page, torch.float32, spread=1.5, **variant)
        operands = batch.q.cpu(), (batch.k_cache.cpu(), batch.v_cache.cpu())
        metadata = AttentionMetadata.build(batch.metadata.query_lens, batch.metadata.kv_lens, batch.pages, page, CPU)
        sinks = None if batch.sinks is None else batch.sinks.cpu()
        output = FAST.attention(*operands, metadata, batch.variant, sinks)
        torch.testing.assert_close(output.double(), batch.truth(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [{"softcap": 20.0}, {"sinks": True}, {"softcap": 20.0, "window": 9}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softcaps_and_sinks_in_half_precision(variant: dict[str, Any], dtype: torch.dtype) -> None:
    """Weights and sums are float32, and the output has the dtype of q."""
    batch = PagedBatch.random([(3, 20), (1, 33), (17, 17)], 4, 2, 32, 16, dtype, **variant)
    q, k, v = (x.cpu() for x in (batch.q, batch.k_cache, batch.v_cache))
    sinks = None if batch.sinks is None else batch.sinks.cpu()
    out = fast_attention.paged_attention(q, (k, v), batch.metadata, batch.variant, sinks)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), batch.truth(), rtol=2e-2, atol=2e-2)
