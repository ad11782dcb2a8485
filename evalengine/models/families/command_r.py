"""Cohere's Command R: attention and feed-forward take the same layer norm's output; each layer turns its pairs.

Command R+, which norms each head of q and k by weights of its own, is refused.
"""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.layers.variants import Norm
from evalengine.models.describe import describe, rope_of
from evalengine.models.gguf_form import GGUFForm, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    if config.use_qk_norm:
        raise ConfigError("use_qk_norm=true: norms with a weight for each head are not supported")
    return describe(
        family,
        config,
        biases=(config.attention_bias, config.attention_bias),
        rope=rope_of(config, interleaved=True, wide=True),
        eps="layer_norm_eps",
        blocks=(Block(parallel="one norm"),),
        norm=Norm(eps=0.0, kind="layer", cast_first=False),
        logits_scale=config.logit_scale,
    )


COMMAND_R = Family(
    "CohereForCausalLM",
    "cohere",
    _spec,
    frozenset({"layer_norm_eps", "logit_scale", "use_qk_norm"}),
    gguf=GGUFForm("command-r", named(logit_scale="logit_scale"), eps="layer_norm_eps"),
)
