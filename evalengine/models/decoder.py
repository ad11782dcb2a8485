"""The decoder of all families: attention and a feed-forward in every layer, as the spec's blocks describe them.

    T tokens, H hidden, Hq/Hkv heads, D head_dim, V vocabulary, B pages of `block_size` tokens, n rows of interest.

Every operation is a layer, so a forward hook sees its output; `Ops` has the arithmetic behind each. An operation that a
family does not have is not there, so a Llama's steps are those of a Llama.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evalengine.kernels.attention_batch import KVCache
from evalengine.layers.attention import NormRopeStore, PagedAttention, StoreKV
from evalengine.layers.base import Layer, product_kinds
from evalengine.layers.embedding import LMHead, VocabEmbedding
from evalengine.layers.experts import Combine, ExpertChoice, ExpertDown, ExpertGateUp, RouterLogits, SharedGate
from evalengine.layers.fast import FastOps
from evalengine.layers.linear import MergedLinear, OutputLinear, QKVLinear, WholeLinear
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Groups, Ops
from evalengine.layers.recurrent import HybridCache, LayerCache, SigmoidGate, States
from evalengine.layers.rows import (
    ActivationLayer,
    Add,
    AddNorm,
    HeadNorm,
    QueryFactors,
    Rope,
    RopeTable,
    RowNorm,
    Scale,
    ScaleColumns,
    ScaleRows,
    Softcap,
    Table,
    XieluLayer,
    scales,
)
from evalengine.models.causal_lm import CausalLM
from evalengine.models.processors import LogitsProcessors
from evalengine.models.recurrent import mixer
from evalengine.models.spec import Block, ModelSpec, Multipliers


class DecoderAttention(nn.Module):
    """q, k, v; norms of q and k, if the model has them, and RoPE; paged attention; the output projection."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops, *, whole: bool) -> None:
        """whole: whether the output is needed whole on every rank (`OutputLinear`)."""
        super().__init__()
        self.ops, self.block = ops, block
        self.table = spec.ropes.index(spec.rope_of(block))
        self.qkv_proj = QKVLinear(
            ops,
            in_features=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bias=spec.attention_bias,
            gate=block.output_gate,
        )
        if block.output_gate:
            self.output_gate = SigmoidGate(ops)
        of_head = block.qk_norm_of == "head"
        if spec.qk_norm and block.qk_norm_of == "each head":
            self.q_norm: RowNorm = HeadNorm(ops, spec.num_heads, spec.head_dim, spec.norms)
            self.k_norm: RowNorm = HeadNorm(ops, spec.num_kv_heads, spec.head_dim, spec.norms)
        elif spec.qk_norm:
            self.q_norm = RowNorm(ops, spec.head_dim if of_head else spec.num_heads * spec.head_dim, spec.norms)
            self.k_norm = RowNorm(ops, spec.head_dim if of_head else spec.num_kv_heads * spec.head_dim, spec.norms)
        self.norms = (self.q_norm, self.k_norm) if spec.qk_norm else None
        self.fused = not spec.qk_norm or (of_head and not block.qk_norm_last)
        factors = block.multipliers or Multipliers()
        self.scale_in, self.key_scale, self.scale_out = scales(
            ops, factors.attention_in, factors.key, factors.attention_out
        )
        self.norm_rope_store = NormRopeStore(ops)
        self.q_rope, self.k_rope, self.store_kv = Rope(ops), Rope(ops), StoreKV(ops)
        self.query_scale = ScaleRows(ops)
        self.attention = PagedAttention(ops, spec.attention_of(block), spec.num_heads)
        features = spec.num_heads * spec.head_dim
        self.o_proj = OutputLinear(ops, features, spec.hidden_size, bias=spec.attention_output_bias, whole=whole)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        cos, sin = tables[2 * self.table : 2 * self.table + 2]
        projected = self.qkv_proj(x if self.scale_in is None else self.scale_in(x))
        qkv = self.qkv_proj.split(projected)
        if self.key_scale is not None:
            qkv = qkv[0], self.key_scale(qkv[1]), qkv[2]
        if self.ops.fused and self.fused:
            q = self.norm_rope_store(qkv, self.norms, cos, sin, kv_cache, metadata.slot_mapping)
        else:
            q = self._in_steps(qkv, cos, sin, kv_cache, metadata.slot_mapping)
        if len(tables) % 2:  # behind the pairs of cosines and sines: factors of the queries
            q = self.query_scale(q, tables[-1])
        out = self.attention(q, kv_cache, metadata).flatten(1)
        if self.block.output_gate:
            out = self.output_gate(out, self.qkv_proj.gate(projected))
        out = self.o_proj(out)
        return out if self.scale_out is None else self.scale_out(out)

    def _in_steps(
        self, qkv: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, kv_cache: KVCache, slot_mapping: Tensor
    ) -> Tensor:
        """Does what `norm_rope_store` does, with the same bytes, an op at a time, so that hooks see each output."""
        q, k, v = qkv
        if self.norms and not self.block.qk_norm_last:
            q, k = self._normed(q, k)
        q, k = self.q_rope(q, cos, sin), self.k_rope(k, cos, sin)
        if self.norms and self.block.qk_norm_last:
            q, k = self._normed(q, k)
        self.store_kv(k, v, kv_cache, slot_mapping)
        return q

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, Hq, D] and k [T, Hkv, D], normed over each head, or over all heads of all ranks."""
        if self.block.qk_norm_of != "vector":
            return self.q_norm(q), self.k_norm(k)
        whole_q, whole_k = self.qkv_proj.gather_heads(q, "q_proj"), self.qkv_proj.gather_heads(k, "k_proj")
        q_heads = self.q_norm(whole_q).unflatten(-1, (-1, q.shape[-1]))
        k_heads = self.k_norm(whole_k).unflatten(-1, (-1, k.shape[-1]))
        return self.qkv_proj.own_heads(q_heads, "q_proj"), self.qkv_proj.own_heads(k_heads, "k_proj")


class LatentAttention(nn.Module):
    """Attention whose keys and values are products of one narrow vector a token (`Latent`), in its expanded form.

    Prefills, chunks and decode steps all expand the latent before keys and values are stored, rounded to the pools'
    dtype: the absorbed form, which multiplies queries with the expanding weight, rounds otherwise. Values are padded
    to D with zeros, which no sum tells.
    """

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
        norm = replace(spec.norms, eps=1e-6)  # the latents' norms have this one, whatever the others have
        if self.q_rank:
            self.q_a_layernorm = RowNorm(ops, self.q_rank, norm)
        name, width = ("q_b_proj", self.q_rank) if self.q_rank else ("q_proj", hidden)
        self.q_b_proj = MergedLinear(ops, width, {name: heads * spec.head_dim})
        self.kv_a_layernorm = RowNorm(ops, latent.kv_rank, norm)
        self.kv_b_proj = MergedLinear(ops, latent.kv_rank, {"kv_b_proj": heads * (self.plain_dim + latent.value_dim)})
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
        # The engine's order of a head: all pairs' first numbers, then their second ones, those that turn before others.
        halves = zip(turned.unsqueeze(1).expand(-1, q.shape[1], -1).chunk(2, -1), plain.chunk(2, -1), strict=True)
        k = torch.cat([part for pair in halves for part in pair], -1)
        return q, k, F.pad(v, (0, self.head_dim - self.latent.value_dim))


class DecoderMLP(nn.Module):
    """The feed-forward: down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops, *, whole: bool) -> None:
        super().__init__()
        sizes = dict.fromkeys(("gate_proj", "up_proj") if block.gated else ("up_proj",), spec.intermediate_size)
        self.gate_up_proj = MergedLinear(ops, spec.hidden_size, sizes, bias=block.mlp_bias)
        xielu = block.activation == "xielu"
        self.activation = XieluLayer(ops) if xielu else ActivationLayer(ops, block.activation, gated=block.gated)
        self.down_proj = OutputLinear(ops, spec.intermediate_size, spec.hidden_size, bias=block.mlp_bias, whole=whole)
        factors, width = block.multipliers or Multipliers(), self.gate_up_proj.local_rows("up_proj")
        scaled = [(width, factors.gate), (width, 1.0)]
        self.gate_scale = ScaleColumns(ops, scaled) if factors.gate != 1.0 else None
        (self.scale_out,) = scales(ops, factors.feed_forward_out)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        if self.gate_scale is not None:
            gate_up = self.gate_scale(gate_up)
        out = self.down_proj(self.activation(gate_up))
        return out if self.scale_out is None else self.scale_out(out)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, added to the residual stream, which is the rounded sum so far.

    A layer takes the output `x` of the layer before, not yet added to `residual`, and hands its own on likewise: all of
    it, or, between two of Llama's norms, this rank's columns (`Ops.fuses_gathers`), which the next norm gathers.
    """

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops) -> None:
        super().__init__()
        self.block = block
        # Where anything but Llama's norm takes a branch's output next, in this layer or the next one, every rank needs
        # all of it.
        plain = spec.norms.is_plain and all(own.norm_before for own in spec.blocks)
        whole = not plain or block.norm_after or block.parallel is not None
        whole = whole or block.residual_scale != 1.0 or block.beside_attention
        size, norm = spec.hidden_size, spec.norms
        self.input_layernorm: nn.Module = AddNorm(ops, size, norm) if block.norm_before else Add(ops)
        if block.attends:
            attention = DecoderAttention if block.latent is None else LatentAttention
            self.self_attn: nn.Module = attention(spec, block, ops, whole=whole)
        if block.recurrence is not None:
            self.mixer = mixer(spec, block, block.recurrence, ops, whole=whole)
        if block.beside_attention:
            self.branches_sum = Add(ops)
        if block.norm_after:
            self.attention_output_norm, self.mlp_output_norm = RowNorm(ops, size, norm), RowNorm(ops, size, norm)
        if block.residual_scale != 1.0:
            self.attention_scale, self.mlp_scale = Scale(ops, block.residual_scale), Scale(ops, block.residual_scale)
        if block.parallel is not None:
            self.add = Add(ops)
        self.post_attention_layernorm: nn.Module
        if block.parallel == "two norms":
            self.post_attention_layernorm = RowNorm(ops, size, norm)
        elif block.parallel is None and block.only is None:
            self.post_attention_layernorm = AddNorm(ops, size, norm) if block.norm_before else Add(ops)
        if block.feeds_forward:
            feed_forward = DecoderMLP if block.mixture is None else DecoderMixture
            self.mlp: nn.Module = feed_forward(spec, block, ops, whole=whole)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        tables: tuple[Tensor, ...],
        kv_cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._enter(self.input_layernorm, x, residual)
        if self.block.only is not None:
            one = self._mixed(x, tables, kv_cache, metadata) if self.block.only == "mixer" else self.mlp(x)
            return one, residual
        attended = self._mixed(x, tables, kv_cache, metadata)
        if self.block.norm_after:
            attended = self.attention_output_norm(attended)
        if self.block.residual_scale != 1.0:
            attended = self.attention_scale(attended)
        if self.block.parallel is None:
            x, residual = self._enter(self.post_attention_layernorm, attended, residual)
        else:
            x = self.post_attention_layernorm(residual) if self.block.parallel == "two norms" else x
            residual = self.add(attended, residual)
        x = self.mlp(x)
        if self.block.norm_after:
            x = self.mlp_output_norm(x)
        return self.mlp_scale(x) if self.block.residual_scale != 1.0 else x, residual

    def _mixed(self, x: Tensor, tables: tuple[Tensor, ...], cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Apply attention, a recurrence or both to all tokens."""
        out: Tensor
        if isinstance(cache, HybridCache):
            mixed = self.mixer(x, cache.states, metadata)
            if self.mixer.scale_out is None:  # a multiplier has made its own tensor
                mixed = self.branches_sum.ops.tp.keep(mixed)
            out = self.branches_sum(mixed, self.self_attn(x, tables, cache.kv, metadata))
        elif isinstance(cache, States):
            out = self.mixer(x, cache, metadata)
        else:
            out = self.self_attn(x, tables, cache, metadata)
        return out

    def _enter(self, step: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A branch's input, and the residual stream that its output is added to."""
        if self.block.norm_before:
            normed: tuple[Tensor, Tensor] = step(x, residual)
            return normed
        total = step(x, residual)
        return total, total


class WeightCounts(NamedTuple):
    """Numbers of weights."""

    all: int
    experts: int  # those of one expert or another, without those that all tokens share


class Decoder(nn.Module):
    """The stack of layers, from token ids to final hidden states."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(ops, spec.vocab_size, spec.hidden_size)
        if spec.embedding_scale != 1.0:
            factor = spec.embedding_scale
            if spec.embedding_scale_rounded:  # transformers' is of the weights' dtype
                factor = torch.tensor(factor, dtype=ops.dtype).item()
            self.embedding_scale = Scale(ops, factor)
        self.scales_embedding = spec.embedding_scale != 1.0
        self.rope_table = RopeTable(
            ops,
            [
                Table(
                    rope.inv_freq(spec.head_dim),
                    rope.turned(spec.head_dim) // 2,
                    rope.attention_factor,
                    rope.wide,
                    None if rope.long_factors is None else rope.of_long_requests.inv_freq(spec.head_dim),
                )
                for rope in spec.ropes
            ],
        )
        self.query_factors = QueryFactors(ops)
        self.layers = nn.ModuleList(DecoderLayer(spec, spec.block(i), ops) for i in range(spec.num_layers))
        self.norm = AddNorm(ops, spec.hidden_size, spec.norms)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        self.embed_tokens.ops.tp.begin()
        x = self.embed_tokens(input_ids)
        if self.scales_embedding:
            x = self.embedding_scale(x)
        residual = torch.zeros_like(x)  # 0 + x is x, except that -0 becomes +0, which no later norm or sum tells apart
        tables = self.rope_table(positions)
        if self.query_factors.built is not None:
            tables = (*tables, self.query_factors(positions))
        for i, (layer, kv_cache) in enumerate(zip(self.layers[: len(kv_caches)], kv_caches, strict=True)):
            x, residual = layer(x, residual, tables, kv_cache, metadata.of_layer(i))
        return self.norm(x, residual)[0]


@lru_cache(maxsize=16)
def weight_counts(spec: ModelSpec) -> WeightCounts:
    """A model's weights, counted in the model; a tied table counts once."""
    model: nn.Module
    if spec.module is not None:
        from evalengine.models.hf_module.source import without_weights  # only such models need transformers' code here

        model = without_weights(spec.module)
    else:
        model = without_storage(spec)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return WeightCounts(sum(counts.values()), sum(n for name, n in counts.items() if ".experts." in name))


def num_parameters(spec: ModelSpec) -> int:
    """The number of a model's weights; a tied table counts once."""
    return weight_counts(spec).all


def without_storage(spec: ModelSpec) -> DecoderForCausalLM:
    """A native model of which only names and shapes are wanted."""
    return DecoderForCausalLM(spec, FastOps(spec.dtype, torch.device("meta")))


class DecoderForCausalLM(CausalLM):
    """The decoder and its vocabulary projection.

    Its parameters, read through `Layer.checkpoint_shards`, have the names of a Hugging Face checkpoint of a Llama.
    """

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.layers_alike = len(set(spec.blocks)) == 1
        self.model = Decoder(spec, ops)
        tied = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(ops, spec.vocab_size, spec.hidden_size, tied_to=tied)
        self.after_head = nn.ModuleList()
        if spec.logits_scale != 1.0:
            self.after_head.append(Scale(ops, spec.logits_scale))
        if spec.logits_softcap is not None:
            self.after_head.append(Softcap(ops, spec.logits_softcap))

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        return self.model(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        for step in self.after_head:
            logits = step(logits)
        return logits

    def whole_logits(self, logits: Tensor) -> Tensor:
        return self.lm_head.whole(logits)

    def sample_layers(self) -> tuple[int, ...]:
        first: dict[object, int] = {}
        for number, layer in enumerate(self.model.layers):
            first.setdefault((layer.block, product_kinds(layer)), number)
        chosen = (*first.values(),)
        return chosen if len(chosen) > 1 else tuple(range(min(2, self.spec.num_layers)))

    def of_layers(self, layers: Sequence[int]) -> DecoderForCausalLM:
        part, decoder = copy.copy(self), copy.copy(self.model)
        part._modules, decoder._modules = dict(self._modules), dict(self.model._modules)
        decoder.layers = nn.ModuleList(self.model.layers[number] for number in layers)
        part.model = decoder
        blocks = tuple(self.spec.block(number) for number in layers)
        part.spec = replace(self.spec, num_layers=len(blocks), blocks=blocks, processors=LogitsProcessors())
        part.layers_alike = len(set(blocks)) == 1 and len({product_kinds(layer) for layer in decoder.layers}) == 1
        return part

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head.read_out(logits, rows, columns)

    def finalize(self, max_model_len: int) -> None:
        """Brings loaded weights into the form that the ops multiply with, and makes RoPE's table of `max_model_len`
        positions."""
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.finalize()
        self.layers_alike &= len({product_kinds(layer) for layer in self.model.layers}) == 1
        self.model.rope_table.build(max_model_len, self.spec.short_positions(max_model_len))
        self.model.query_factors.build(self.spec.rope.query_factors(max_model_len))


class Experts(nn.Module):
    """Every expert's gate, up and down projection."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops) -> None:
        super().__init__()
        assert block.mixture is not None
        count, inner, bias = block.mixture.router.experts, block.mixture.intermediate_size, block.mixture.bias
        self.gate_up_proj = ExpertGateUp(ops, count, spec.hidden_size, inner, bias)
        self.activation = ActivationLayer(ops, block.activation)
        self.down_proj = ExpertDown(ops, count, inner, spec.hidden_size, bias)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """[T, H] -> [T, k, h]."""
        gate_up = self.gate_up_proj(x, groups)
        return self.down_proj(self.activation(gate_up), groups)


class SharedExpert(nn.Module):
    """The expert that every token has: a feed-forward whose output is this rank's columns, or its part of a sum."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops) -> None:
        super().__init__()
        assert block.mixture is not None
        inner = block.mixture.shared_size
        sizes = dict.fromkeys(("gate_proj", "up_proj"), inner)
        self.gate_up_proj = MergedLinear(ops, spec.hidden_size, sizes, bias=block.mlp_bias)
        self.activation = ActivationLayer(ops, block.activation)
        self.down_proj = OutputLinear(ops, inner, spec.hidden_size, bias=block.mlp_bias, part=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class DecoderMixture(nn.Module):
    """Each token's experts, weighted, and the expert that all tokens share, if there is one."""

    def __init__(self, spec: ModelSpec, block: Block, ops: Ops, *, whole: bool) -> None:
        """whole: whether the output is needed whole on every rank (`OutputLinear`)."""
        super().__init__()
        assert block.mixture is not None
        self.ops, self.mixture = ops, block.mixture
        self.gate = RouterLogits(ops, self.mixture.router, spec.hidden_size)
        self.choice = ExpertChoice(ops, self.mixture.router)
        self.experts = Experts(spec, block, ops)
        if self.mixture.shared_size:
            self.shared_expert = SharedExpert(spec, block, ops)
        if self.mixture.shared_gate:
            self.shared_expert_gate = SharedGate(ops, spec.hidden_size)
        self.combine = Combine(ops, whole=whole)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], or [T, h] if the gathers are fused."""
        ids, weights = self.choice(self.gate(x))
        parts = self.experts(x, self.ops.group(ids, self.mixture.router.experts))
        shared = self.shared_expert(x) if self.mixture.shared_size else None
        if self.mixture.shared_gate:
            shared = self.shared_expert_gate(x, shared)
        return self.combine(parts, weights, shared)
