"""The decoder that Llama, Qwen2 and Qwen3 share: pre-norm attention and a gated SiLU feed-forward.

    T tokens, H hidden, Hq/Hkv heads, D head_dim, V vocabulary, B pages of `block_size` tokens, n rows of interest.

Every operation is a layer, so a forward hook sees its output; `Ops` has the arithmetic behind each.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers.attention import KVCache, NormRopeStore, PagedAttention, StoreKV
from evalengine.layers.base import Layer
from evalengine.layers.embedding import LMHead, VocabEmbedding
from evalengine.layers.linear import MergedLinear, OutputLinear, QKVLinear
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.layers.rows import AddRMSNorm, RMSNorm, Rope, RopeTable, SiluAndMul
from evalengine.models.spec import ModelSpec


class DecoderAttention(nn.Module):
    """q, k, v; an optional norm over each head's q and k; RoPE; paged attention; the output projection."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.qkv_proj = QKVLinear(
            ops, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, bias=spec.attention_bias
        )
        if spec.qk_norm:
            self.q_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps)
            self.k_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps)
        self.norms = (self.q_norm, self.k_norm) if spec.qk_norm else None
        self.norm_rope_store = NormRopeStore(ops)
        self.q_rope, self.k_rope, self.store_kv = Rope(ops), Rope(ops), StoreKV(ops)
        self.attention = PagedAttention(ops, AttentionVariant(spec.attention_scale))
        features = spec.num_heads * spec.head_dim
        self.o_proj = OutputLinear(ops, features, spec.hidden_size, bias=spec.attention_output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        qkv = self.qkv_proj.split(self.qkv_proj(x))
        if self.ops.fused:
            q = self.norm_rope_store(qkv, self.norms, cos, sin, kv_cache, metadata.slot_mapping)
        else:
            q = self._in_steps(qkv, cos, sin, kv_cache, metadata.slot_mapping)
        return self.o_proj(self.attention(q, kv_cache, metadata).flatten(1))

    def _in_steps(
        self, qkv: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, kv_cache: KVCache, slot_mapping: Tensor
    ) -> Tensor:
        """Does what `norm_rope_store` does, with the same bytes, an op at a time, so that hooks see each output."""
        q, k, v = qkv
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.q_rope(q, cos, sin), self.k_rope(k, cos, sin)
        self.store_kv(k, v, kv_cache, slot_mapping)
        return q


class DecoderMLP(nn.Module):
    """The gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        sizes = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = MergedLinear(ops, spec.hidden_size, sizes)
        self.activation = SiluAndMul(ops)
        self.down_proj = OutputLinear(ops, spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the norm of the residual stream, which is the rounded sum so far.

    A layer takes the output `x` of the layer before, not yet added to `residual`, and hands its own on likewise: all of
    it, or this rank's columns (`Ops.fuses_gathers`), which the next norm gathers.
    """

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(ops, spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = DecoderAttention(spec, ops)
        self.post_attention_layernorm = AddRMSNorm(ops, spec.hidden_size, spec.rms_norm_eps)
        self.mlp = DecoderMLP(spec, ops)

    def forward(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos, sin, kv_cache, metadata)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """The stack of layers, from token ids to final hidden states."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(ops, spec.vocab_size, spec.hidden_size)
        self.rope_table = RopeTable(ops, spec.rope.inv_freq(spec.head_dim))
        self.layers = nn.ModuleList(DecoderLayer(spec, ops) for _ in range(spec.num_layers))
        self.norm = AddRMSNorm(ops, spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        self.embed_tokens.ops.tp.begin()
        x = self.embed_tokens(input_ids)
        residual = torch.zeros_like(x)  # 0 + x is x, except that -0 becomes +0, which no later norm or sum tells apart
        cos, sin = self.rope_table(positions)
        for layer, kv_cache in zip(self.layers[: len(kv_caches)], kv_caches, strict=True):
            x, residual = layer(x, residual, cos, sin, kv_cache, metadata)
        return self.norm(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """The decoder and its vocabulary projection. A subclass states how its architecture differs.

    Its parameters, read through `Layer.checkpoint_shards`, have the names of a Hugging Face checkpoint.
    """

    model_type: ClassVar[str]  # Hugging Face's config.model_type and GGUF's general.architecture
    qk_norm: ClassVar[bool] = False
    gguf_interleaved_rope: ClassVar[bool] = False  # GGUF files hold q and k with each head's RoPE pairs side by side

    @classmethod
    def attention_biases(cls, config: Any) -> tuple[bool, bool]:
        """Whether (q, k and v; the output projection) have biases under this transformers config."""
        raise TypeError(f"{cls.__name__} must define attention_biases")

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.model = Decoder(spec, ops)
        tied = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(ops, spec.vocab_size, spec.hidden_size, tied_to=tied)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """Normed hidden states [T, H] of token ids and positions, int64 [T] each.

        kv_caches: a (k, v) pair of pools [B, block_size, Hkv, D] for each layer. With fewer pairs than layers, only the
        first so many layers are computed.
        """
        return self.model(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> float32 logits [n, V]; with several ranks, of this rank's part of the vocabulary."""
        return self.lm_head(hidden)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Every rank's logits from `compute_logits` -> those of the whole vocabulary, [n, V]."""
        return self.lm_head.whole(logits)

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        """`Ops.read_out` of logits from `compute_logits`."""
        return self.lm_head.read_out(logits, rows, columns)

    def finalize(self, max_model_len: int) -> None:
        """Brings loaded weights into the form that the ops multiply with, and makes RoPE's table of `max_model_len`
        positions."""
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.finalize()
        self.model.rope_table.build(max_model_len)
