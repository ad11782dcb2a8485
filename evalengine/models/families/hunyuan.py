"""HunYuan dense: each head's query and key is normed after RoPE; "dynamic" RoPE with an alpha is a base, fixed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.models.describe import describe, head_dim, rope_of
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.rope import RopeSpec
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _rope(config: Any) -> RopeSpec:
    """transformers' `HunYuanDenseV1RotaryEmbedding`: base * alpha ** (D / (D - 2))."""
    rope = rope_of(config)
    alpha = config.rope_parameters.get("alpha")
    if config.rope_parameters.get("rope_type") != "dynamic" or not alpha:
        return rope
    d = head_dim(config)
    return replace(rope, type="default", factor=1.0, theta=rope.theta * alpha ** (d / (d - 2)))


def _spec(family: Family, config: Any) -> ModelSpec:
    return describe(family, config, qk_norm=True, rope=_rope(config), blocks=(Block(qk_norm_last=True),))


HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    _spec,
    frozenset({"dynamic"}),
    WeightNames(parts={"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"}),
    GGUFForm("hunyuan-dense"),  # whose base has alpha in it
    implied={"norm_type": ("rms",), "use_cla": (False,), "use_rotary_pos_emb": (True,)},
)
