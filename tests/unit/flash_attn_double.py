"""A double of flash-attn 2.8.3's two paged functions: the real parameters, the requirements that the package documents
or checks in C++ (with its words), and the result from float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evalengine.kernels.attention_variant import AttentionVariant
from tests.references import reference


def requires(condition: bool, words: str) -> None:
    if not condition:
        raise RuntimeError(words)


class FlashAttnDouble:
    """Stands for the module `flash_attn`; `calls` are (function name, q's shape, k lengths' tensor)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], Tensor]] = []

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        self.calls.append(("flash_attn_varlen_func", tuple(q.shape), cu_seqlens_k))
        requires(q.ndim == 3, "q must have shape (total_q, num_heads, head_size)")
        seqs = block_table.shape[0]
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            requires(x.dtype == torch.int32, f"{name} must have dtype int32")
            requires(x.is_contiguous(), f"{name} must be contiguous")
            requires(x.shape == (seqs + 1,), f"{name} must have shape (batch_size + 1)")
            requires(x[0] == 0, f"{name} starts at 0")
        query_lens, kv_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        requires(int(query_lens.sum()) == q.shape[0], "cu_seqlens_q indexes into q")
        requires(type(max_seqlen_q) is int and max_seqlen_q >= query_lens.max(), "maximum query length")
        requires(type(max_seqlen_k) is int and max_seqlen_k >= kv_lens.max(), "maximum key length")
        requires(max_seqlen_q > 1 or q.shape[0] == seqs, "q.reshape({batch_size, num_heads_k, ngroups, head_size})")
        requires(dropout_p == 0.0, "dropout_p should be set to 0.0 during evaluation")
        variant = self._variant(softmax_scale, causal, window_size, softcap)
        return self._attend(q, k, v, block_table, query_lens.tolist(), kv_lens.tolist(), variant)

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        self.calls.append(("flash_attn_with_kvcache", tuple(q.shape), cache_seqlens))
        requires(q.ndim == 4, "q must have shape (batch_size, seqlen, num_heads, head_size)")
        seqs, rows = q.shape[:2]
        requires(seqs > 0, "batch size must be positive")
        requires(k is None and v is None, "the new keys and values are in the cache already")
        requires(cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
        requires(cache_seqlens.is_contiguous(), "seqlens_k must be contiguous")
        requires(cache_seqlens.shape == (seqs,), "seqlens_k must have shape (batch_size)")
        flat = q.flatten(0, 1)
        variant = self._variant(softmax_scale, causal, window_size, softcap)
        out = self._attend(flat, k_cache, v_cache, block_table, [rows] * seqs, cache_seqlens.tolist(), variant)
        return out.unflatten(0, (seqs, rows))

    def _variant(self, scale: Any, causal: bool, window_size: tuple[int, int], softcap: float) -> AttentionVariant:
        """Its window counts the keys before a query's own; -1 is none. Its softcap is off at 0."""
        requires(causal and scale is not None, "causal attention, scaled")
        before, after = window_size
        requires(after in (-1, 0), "causal attention sees no later key")
        return AttentionVariant(scale, None if before < 0 else before + 1, softcap or None)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Any,
        query_lens: list,
        kv_lens: list,
        variant: AttentionVariant,
    ) -> Tensor:
        requires(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
        requires(q.dtype == k.dtype == v.dtype, "query and key must have the same dtype")
        for x in (q, k, v):
            requires(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        requires(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        requires(q.shape[-1] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
        requires(q.shape[1] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
        requires(
            k.ndim == 4 and k.shape == v.shape,
            "k must have shape (num_blocks, page_block_size, num_heads_k, head_size)",
        )
        requires(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        requires(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        requires(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        requires(
            block_table.shape[0] == len(kv_lens) and max(kv_lens) <= block_table.shape[1] * k.shape[1],
            "block_table must have shape (batch_size, max_num_blocks_per_seq)",
        )
        return reference.paged_attention(q, k, v, block_table, query_lens, kv_lens, variant).to(q.dtype)
