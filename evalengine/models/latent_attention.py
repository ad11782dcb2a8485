"""Attention whose keys and values are products of one narrow vector a token (`Latent`), in its expanded form.

    T tokens, H hidden, Hq heads, D a head's keys, R of them turned, V its values.

Prefills, chunks and decode steps all expand the latent before keys and values are stored, rounded to the pools' dtype:
the absorbed form, which multiplies queries with the expanding weight, rounds otherwise. Values are padded to D with
zeros, which no sum tells.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evalengine.kernels.attention_batch import KVCache
from evalengine.layers.attention import NormRopeStore, PagedAttention, StoreKV
from evalengine.layers.linear import MergedLinear, OutputLinear, WholeLinear
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.layers.rows import Rope, RowNorm
from evalengine.models.spec import Block, ModelSpec

EPS = 1e-6  # of the latents' norms, whatever the others' is


class LatentAttention(nn.Module):
    """The latents, their norms, their expansion; RoPE; paged attention; the output projection."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops, *, whole: bool) -> None:
        """whole: whether the output is needed whole on every rank (`OutputLinear`)."""
        super().__init__()
        assert block.latent is not None
        self.ops, self.latent, self.head_dim = ops, block.latent, spec.head_dim
        self.table = spec.ropes.index(spec.rope_of(block))
        heads, hidden, latent = spec.num_heads, spec.hidden_size, block.latent
        self.plain_dim = spec.head_dim - latent.rotary_dim  # of a head's keys, those that the latent is expanded to
        self.q_rank = latent.q_rank or 0
        sizes = {"q_a_proj": self.q_rank} if self.q_rank else {}
        sizes["kv_a_proj_with_mqa"] = latent.kv_rank + latent.rotary_dim
        self.a_proj = WholeLinear(ops, hidden, sizes, bias=spec.attention_bias)
        norm = replace(spec.norms, eps=EPS)
        if self.q_rank:
            self.q_a_layernorm = RowNorm(ops, self.q_rank, norm)
        name = "q_b_proj" if self.q_rank else "q_proj"
        self.q_b_proj = MergedLinear(ops, self.q_rank or hidden, {name: heads * spec.head_dim})
        self.kv_a_layernorm = RowNorm(ops, latent.kv_rank, norm)
        expanded = self.plain_dim + latent.value_dim
        self.kv_b_proj = MergedLinear(ops, latent.kv_rank, {"kv_b_proj": heads * expanded})
        self.norm_rope_store = NormRopeStore(ops)
        self.q_rope, self.k_rope, self.store_kv = Rope(ops), Rope(ops), StoreKV(ops)
        self.attention = PagedAttention(ops, spec.attention_of(block), heads)
        self.o_proj = OutputLinear(ops, heads * latent.value_dim, hidden, bias=spec.attention_output_bias, whole=whole)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        cos, sin = tables[2 * self.table : 2 * self.table + 2]
        qkv = self._expanded(x)
        if self.ops.fused:
            q = self.norm_rope_store(qkv, None, cos, sin, kv_cache, metadata.slot_mapping)
        else:
            q, k = self.q_rope(qkv[0], cos, sin), self.k_rope(qkv[1], cos, sin)
            self.store_kv(k, qkv[2], kv_cache, metadata.slot_mapping)
        attended = self.attention(q, kv_cache, metadata)
        return self.o_proj(attended[..., : self.latent.value_dim].flatten(1))

    def _expanded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] -> q, k and v of this rank's heads, [T, Hq, D] each, before RoPE."""
        narrow = self.a_proj(x)
        q_latent, latent, turned = narrow.split([self.q_rank, self.latent.kv_rank, self.latent.rotary_dim], dim=-1)
        q = self.q_b_proj(self.q_a_layernorm(q_latent) if self.q_rank else x).unflatten(-1, (-1, self.head_dim))
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (q.shape[1], -1))
        plain, v = heads.split([self.plain_dim, self.latent.value_dim], dim=-1)
        shared = turned.unsqueeze(1).expand(-1, q.shape[1], -1)
        # The engine's order of a head: all pairs' first numbers, then their second ones, those that turn before others.
        halves = zip(shared.chunk(2, -1), plain.chunk(2, -1), strict=True)
        k = torch.cat([part for pair in halves for part in pair], -1)
        return q, k, F.pad(v, (0, self.head_dim - self.latent.value_dim))
