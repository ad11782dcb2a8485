"""Paged attention on torch's scaled_dot_product_attention: sequences of like size in one padded batch.

    S sequences of a group, Q query rows a sequence (padded), L KV tokens a sequence (padded), P pages,
    Hq/Hkv heads, D head_dim.

Only valid slots of the pool are ever used: padding is zeroed, so NaN in a stale page cannot reach a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.attention_window import Reached
from evalengine.layers.metadata import AttentionMetadata

GROUP_TOKENS = 1 << 16  # KV tokens gathered at once; the limit bounds the copy
GROUP_SCORES = 1 << 24  # query rows times KV tokens at once; the limit bounds the mask


def paged_attention(
    q: Tensor, kv: KVCache, metadata: AttentionMetadata, variant: AttentionVariant, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the pools -> [T, Hq, D]; sinks [Hq]."""
    output = torch.empty_like(q)
    starts = [0]
    for length in metadata.query_lens:
        starts.append(starts[-1] + length)
    lens, page = (metadata.query_lens, metadata.kv_lens), kv[0].shape[1]
    reached = Reached.of(metadata.block_table, *lens, page, variant.window)
    for group in _groups(metadata.query_lens, reached.kv_lens):
        q_lens, kv_lens, firsts = (
            torch.tensor([of[s] for s in group]) for of in (metadata.query_lens, reached.kv_lens, reached.firsts)
        )
        steps = torch.arange(int(q_lens.max()))
        rows = torch.tensor([starts[s] for s in group])[:, None] + torch.minimum(steps, q_lens[:, None] - 1)
        real = steps < q_lens[:, None]
        k, v = (_gather(cache, reached.block_table[group], firsts, kv_lens) for cache in kv)
        out = _attend(q[rows.to(q.device)], k, v, q_lens, kv_lens, variant, sinks)
        real_places = real.flatten().nonzero().squeeze(1).to(q.device)
        output[rows[real].to(q.device)] = out.flatten(0, 1)[real_places]
    return output


def _groups(query_lens: list[int], kv_lens: list[int]) -> Iterator[list[int]]:
    """Sequences whose lengths agree to a power of two, in groups that keep the padded sizes bounded."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for s, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if query_len:
            buckets.setdefault((query_len.bit_length(), kv_len.bit_length()), []).append(s)
    for bucket in buckets.values():
        q_max, kv_max = max(query_lens[s] for s in bucket), max(kv_lens[s] for s in bucket)
        size = max(1, min(GROUP_TOKENS // kv_max, GROUP_SCORES // (q_max * kv_max)))
        for start in range(0, len(bucket), size):
            yield bucket[start : start + size]


def _gather(cache: Tensor, block_table: Tensor, firsts: Tensor, kv_lens: Tensor) -> Tensor:
    """Copies the sequences' KV out of a pool [B, block_size, Hkv, D] by the block table, int32 [S, P].

    Returns [S, Hkv, L, D] with zeros before each sequence's first position and past its length.
    """
    longest, block_size = int(kv_lens.max()), cache.shape[1]
    pages = block_table[:, : -(-longest // block_size)]
    tokens = cache[pages].flatten(1, 2)[:, :longest]  # indexing makes a copy
    for begin, end in ((0, int(firsts.max())), (int(kv_lens.min()), longest)):
        positions = torch.arange(begin, end)
        unused = (positions < firsts[:, None]) | (positions >= kv_lens[:, None])
        tokens[:, begin:end].masked_fill_(unused.to(cache.device)[:, :, None, None], 0)
    return tokens.transpose(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, q_lens: Tensor, kv_lens: Tensor, variant: AttentionVariant, sinks: Tensor | None
) -> Tensor:
    """q [S, Q, Hq, D], k and v [S, Hkv, L, D] -> [S, Q, Hq, D]. Row i sees tokens up to kv_len - query_len + i."""
    rows, heads, tokens = q.shape[1], q.shape[2], k.shape[2]
    if variant.softcap is not None or sinks is not None:
        return _attend_in_steps(q, k, v, q_lens, kv_lens, variant, sinks)
    scale = variant.scale
    if rows == 1:  # in decode a KV head's queries become the rows of one product
        q = q[:, 0].unflatten(1, (k.shape[1], -1))
        mask = _visible(0, 1, tokens, q_lens, kv_lens, variant.window).to(q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).reshape(-1, 1, heads, q.shape[-1])
    q = q.transpose(1, 2)
    k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    if len(q_lens) == 1 and rows == tokens and tokens <= (variant.window or tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    mask = _visible(0, rows, tokens, q_lens, kv_lens, variant.window).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def _visible(begin: int, end: int, tokens: int, q_lens: Tensor, kv_lens: Tensor, window: int | None) -> Tensor:
    """bool [S, 1, end - begin, L]: which tokens each of the rows begin ... end - 1 sees."""
    last = ((kv_lens - q_lens)[:, None] + torch.arange(begin, end))[:, :, None]
    positions = torch.arange(tokens)
    seen = positions <= last
    if window is not None:
        seen &= positions > last - window
    return seen[:, None]


def _attend_in_steps(
    q: Tensor, k: Tensor, v: Tensor, q_lens: Tensor, kv_lens: Tensor, variant: AttentionVariant, sinks: Tensor | None
) -> Tensor:
    """`_attend` with a softcap or sinks, which SDPA has not: scores and weights in float32, some rows at once."""
    rows, heads, tokens, dtype = q.shape[1], q.shape[2], k.shape[2], q.dtype
    q = q.transpose(1, 2).float()
    k, v = (x.repeat_interleave(heads // k.shape[1], dim=1).float() for x in (k, v))
    output = torch.empty_like(q)
    step = max(1, GROUP_SCORES // (len(q) * heads * tokens))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        scores = (q[:, :, begin:end] @ k.mT).mul_(variant.scale)
        if variant.softcap is not None:
            scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
        seen = _visible(begin, end, tokens, q_lens, kv_lens, variant.window).to(q.device)
        scores.masked_fill_(~seen, -torch.inf)
        if sinks is not None:
            logits = sinks.float()[:, None, None].expand(len(q), -1, end - begin, 1)
            scores = torch.cat((scores, logits), dim=-1)
        output[:, :, begin:end] = scores.softmax(-1)[..., :tokens] @ v
    return output.transpose(1, 2).to(dtype)
