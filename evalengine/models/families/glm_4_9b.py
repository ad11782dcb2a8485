"""GLM-4 9B of 2024: a Llama with biases on q, k and v, whose RoPE turns half of each head, pairs side by side."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe, rope_of
from evalengine.models.registry import Family
from evalengine.models.spec import ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    return describe(family, config, biases=(config.attention_bias, False), rope=rope_of(config, interleaved=True))


GLM = Family(
    "GlmForCausalLM", "glm", _spec, frozenset({"partial_rotary_factor"}), WeightNames(gate_up="mlp.gate_up_proj")
)
