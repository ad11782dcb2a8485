"""Qwen3.5: three of four layers a gated delta rule, the others attention with an output gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.recurrent_variant import GatedDelta
from evalengine.layers.variants import Norm
from evalengine.models.describe import by_layer, describe
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import OF_TEXT_PART, WeightNames

_READS = frozenset(
    {
        *("layer_types", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "partial_rotary_factor"),
    }
)
_NAMES = WeightNames(
    parts={
        "linear_attn.in_proj_qkv": "mixer.in_proj_qkv",
        "linear_attn.in_proj_z": "mixer.in_proj_z",
        "linear_attn.in_proj_b": "mixer.in_proj_b",
        "linear_attn.in_proj_a": "mixer.in_proj_a",
        "linear_attn.conv1d": "mixer.conv",
        "linear_attn.A_log": "mixer.A_log",
        "linear_attn.dt_bias": "mixer.dt_bias",
        "linear_attn.norm": "mixer.norm",
        "linear_attn.out_proj": "mixer.out_proj",
    },
    skipped=("mtp.",),
    bare=(".A_log", ".dt_bias"),
    gated_q=True,
)


def _spec(family: Family, config: Any) -> ModelSpec:
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    if not keys or heads % keys:
        raise ConfigError(f"linear_num_value_heads={heads}: must be a multiple of linear_num_key_heads={keys}")
    rule = GatedDelta(
        keys, heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    )
    attention, recurrent = Block(output_gate=True), Block(recurrence=rule)
    blocks = by_layer(config, lambda kind: recurrent if kind == "linear_attention" else attention, "linear_attention")
    return describe(
        family,
        config,
        biases=(config.attention_bias, config.attention_bias),
        qk_norm=True,
        blocks=blocks,
        norm=Norm(eps=0.0, offset=1.0, cast_first=False),
    )


QWEN3_5 = Family("Qwen3_5ForCausalLM", "qwen3_5_text", _spec, _READS, _NAMES)
QWEN3_5_IMAGES = Family(
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    weights=replace(_NAMES, prefixes=OF_TEXT_PART.prefixes, skipped=("mtp.", "model.visual.", "visual.")),
    wraps="qwen3_5_text",
)
