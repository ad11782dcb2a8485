"""Helium: a Llama whose norms round their weighted result, and whose RoPE has its pairs side by side."""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import describe, rope_of
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    return describe(
        family,
        config,
        biases=(config.attention_bias, False),
        rope=rope_of(config, interleaved=True),
        blocks=(Block(mlp_bias=config.mlp_bias),),
        norm=Norm(eps=0.0, cast_first=False),
    )


HELIUM = Family("HeliumForCausalLM", "helium", _spec, frozenset({"mlp_bias"}))
