"""ERNIE 4.5, dense: a Llama whose RoPE has its pairs side by side and rounds only its result."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe, rope_of
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    rope = rope_of(config, interleaved=True, wide=True)
    biases = (config.use_bias, config.use_bias)
    return describe(family, config, biases=biases, rope=rope, blocks=(Block(mlp_bias=config.use_bias),))


ERNIE45 = Family("Ernie4_5ForCausalLM", "ernie4_5", _spec, frozenset({"use_bias"}))
