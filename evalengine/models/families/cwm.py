"""CWM, the code world model: a Llama in which every layer but each fourth sees a window."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import WINDOW, describe, windows
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    return describe(family, config, biases=(False, False), blocks=windows(config, Block(mlp_bias=config.mlp_bias)))


CWM = Family("CwmForCausalLM", "cwm", _spec, WINDOW | {"mlp_bias"})
