"""Granite 3 and 4, dense: a Llama whose embedding, scores, branches and logits have factors of their own."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec

_READS = frozenset(
    {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier", "mlp_bias"}
)


def _spec(family: Family, config: Any) -> ModelSpec:
    block = Block(
        scale=config.attention_multiplier,
        residual_scale=config.residual_multiplier,
        mlp_bias=config.mlp_bias,
    )
    return describe(
        family,
        config,
        biases=(config.attention_bias, config.attention_bias),
        blocks=(block,),
        embedding_scale=config.embedding_multiplier,
        logits_scale=1.0 / config.logits_scaling,
    )


GRANITE = Family("GraniteForCausalLM", "granite", _spec, _READS)
