"""GLM-4: norms around both branches, RoPE on half of each head, its pairs side by side, gate and up in one tensor."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe, rope_of
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    rope = rope_of(config, interleaved=True)
    return describe(family, config, biases=(config.attention_bias, False), rope=rope, blocks=(Block(norm_after=True),))


GLM4 = Family(
    "Glm4ForCausalLM",
    "glm4",
    _spec,
    frozenset({"partial_rotary_factor"}),
    WeightNames(
        parts={"post_self_attn_layernorm": "attention_output_norm", "post_mlp_layernorm": "mlp_output_norm"},
        gate_up="mlp.gate_up_proj",
    ),
)
