"""config.json as models are published with it, and the same configurations in tiny sizes.

`published_configs.json` has the fields of the config.json of 74 published checkpoints, older spellings included (facts,
no code). A review of this project collected the first 68: lists of LongRoPE's factors are placeholders, some of the
smaller sizes are those of a sibling, and a few entries are variants that a model card describes (YaRN). The last six
are from copies in public repositories; those of LFM2-8B-A1B and Devstral have only some of the fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalengine.models.registry import MODEL_REGISTRY, Family, find_family_of_type

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text())
LAYERS, VOCAB, WINDOW = 8, 211, 9
_SIZES: Mapping[str, Any] = {
    "hidden_size": 96, "intermediate_size": 148, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "vocab_size": VOCAB, "sliding_window": WINDOW, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 52, "moe_layer_end_index": 7,
    "shared_expert_intermediate_size": 60, "shared_intermediate_size": 148, "moe_k": 3, "num_experts_per_tok": 3,
    "experts_per_token": 3, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 14, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_ssm": 192,
    "mamba_num_heads": 6, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "dtype": "float32",
    "torch_dtype": "float32", "block_dim": 96, "conv_dim": 96, "num_heads": 6, "org_vocab_size": VOCAB,
    "rotary_dim": 16, "hybrid_override_pattern": "M-M*-M*-",
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
}  # fmt: skip


def family_of(raw: Mapping[str, Any]) -> Family | None:
    """The native family that describes the text of a published model."""
    family = find_family_of_type(raw["model_type"])
    if family is None or family.wraps is None:
        return family
    return find_family_of_type(raw["text_config"].get("model_type", family.wraps))


def native_families() -> set[str]:
    return {family.model_type for family in MODEL_REGISTRY.values() if family.wraps is None}


def tiny(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A published configuration in tiny sizes and float32, its fields spelled as there; of several parts, the text's.

    Only sizes change: factors, scales and kinds of layers are those of the file, as far as `LAYERS` layers have them.
    """
    if "text_config" in raw:
        shared = {name: raw[name] for name in ("torch_dtype", "tie_word_embeddings") if name in raw}
        return tiny({**shared, **raw["text_config"]})
    ends = {"bos_token_id": 1, "eos_token_id": 2}  # the class's own are beyond the vocabulary
    small = ends | {name: _SIZES[name] if name in _SIZES and value else value for name, value in raw.items()}
    for name, value in raw.items():
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]:
            small[name] = value[:LAYERS]
    for name in ("head_dim", "attention_head_dim"):
        if size := raw.get(name):
            small[name] = 16 if size * raw["num_attention_heads"] == raw["hidden_size"] else 32
    if heads := raw.get("num_key_value_heads"):
        small["num_key_value_heads"] = 6 if heads == raw["num_attention_heads"] else min(heads, 2)
    for name, most in {"n_group": 4, "topk_group": 2}.items():
        if name in raw:
            small[name] = min(raw[name], most)
    rope = dict(raw.get("rope_scaling") or {})
    if "long_factor" in rope:
        turned = int(small.get("head_dim", 16) * raw.get("partial_rotary_factor", 1.0)) // 2
        small["rope_scaling"] = {**rope, **{name: rope[name][:turned] for name in ("short_factor", "long_factor")}}
    small.pop("quantization_config", None)  # no packed weights
    return small
