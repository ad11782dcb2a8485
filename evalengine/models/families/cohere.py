"""Cohere's Command R7B: attention and feed-forward take the same layer norm's output and are added together.

Layers that see a window turn pairs side by side; the others have no positions.
"""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import WINDOW, by_layer, describe, rope_of, window
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, add_windows, named
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    def block(kind: str) -> Block:
        slides = kind == "sliding_attention"
        return Block(
            rope=None if slides else NO_ROPE,
            window=window(config) if slides else None,
            parallel="one norm",
        )

    return describe(
        family,
        config,
        biases=(config.attention_bias, config.attention_bias),
        rope=rope_of(config, interleaved=True, wide=True),
        eps="layer_norm_eps",
        blocks=by_layer(config, block),
        norm=Norm(eps=0.0, kind="layer", cast_first=False),
        logits_scale=config.logit_scale,
    )


def _gguf(metadata: Metadata, config: Config) -> None:
    named(logit_scale="logit_scale")(metadata, config)
    add_windows(metadata, config, period=4)


COHERE2 = Family(
    "Cohere2ForCausalLM",
    "cohere2",
    _spec,
    WINDOW | {"layer_norm_eps", "logit_scale"},
    gguf=GGUFForm("cohere2", _gguf, eps="layer_norm_eps"),
)
