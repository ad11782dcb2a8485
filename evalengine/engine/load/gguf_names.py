"""The names of a GGUF file's tensors: their Hugging Face names, and the tensors that a model needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from evalengine.errors import listed
from evalengine.layers.base import checkpoint_tensors
from evalengine.models.decoder import without_storage
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
_FIRST_LAYER = "model.layers.0."
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
    """GGUF name -> shape, a row's length last, of every tensor of a model whose layers are alike."""
    top_of, role_of = ({theirs: own for own, theirs in names.items()} for names in (_TOP_NAMES, _LAYER_NAMES))
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in checkpoint_tensors(without_storage(replace(spec, num_layers=1))):
        name, _, kind = tensor.name.rpartition(".")
        if not name.startswith(_FIRST_LAYER):
            shapes[f"{top_of[name]}.{kind}"] = tensor.shape
            continue
        role = role_of[name.removeprefix(_FIRST_LAYER)]
        shapes |= {f"blk.{layer}.{role}.{kind}": tensor.shape for layer in range(spec.num_layers)}
    return shapes


def listing(names: Sequence[str]) -> str:
    """Names from a file for a message: the first eight, shortened, and how many more there are."""
    return listed([name[:100] for name in names], 8)
