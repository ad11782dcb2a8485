"""Gemma 1 and CodeGemma: norm weights kept less one, an embedding times sqrt(hidden size), and a GELU.

transformers takes the tanh's approximation of a GELU, whatever name the file has for it.
"""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import activation_of, describe
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    return describe(
        family,
        config,
        biases=(config.attention_bias, config.attention_bias),
        blocks=(Block(activation=activation_of(config)),),
        norm=Norm(eps=0.0, offset=1.0, cast_first=False),
        embedding_scale=config.hidden_size**0.5,
    )


GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    _spec,
    frozenset({"hidden_act", "hidden_activation"}),
    gguf=GGUFForm("gemma", norms_plus_one=True),
)
