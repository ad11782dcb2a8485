"""The names of a GGUF file's tensors: their Hugging Face names, and the tensors that a model needs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from evalengine.errors import listed
from evalengine.models.spec import ModelSpec

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the RoPE frequencies, in which Llama 3 scaling is worked out


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name outside the table is kept as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, role, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[role]}.{kind}" if role in _LAYER_NAMES else name
    role, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[role]}.{kind}" if role in _TOP_NAMES else name


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape, a row's length last, of every tensor of a model."""
    hidden, inner, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if spec.attention_bias:
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if spec.attention_output_bias:
        layer["attn_output.bias"] = (hidden,)
    if spec.qk_norm:
        layer |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    top: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, hidden), "output_norm.weight": (hidden,)}
    if not spec.tie_word_embeddings:
        top[HEAD] = (vocab, hidden)
    return top | {f"blk.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}


def listing(names: Sequence[str]) -> str:
    """Names from a file for a message: the first eight, shortened, and how many more there are."""
    return listed([name[:100] for name in names], 8)
