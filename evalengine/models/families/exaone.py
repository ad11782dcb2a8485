"""EXAONE 4: each branch's output is normed, not its input; each head's query and key is normed before RoPE.

In the large ones three of four layers see a window, and the others have no positions.
"""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import WINDOW, by_layer, describe, window
from evalengine.models.gguf_form import GGUFForm, add_windows
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    def block(kind: str) -> Block:
        slides = kind == "sliding_attention"
        return Block(
            rope=None if slides or config.sliding_window is None else NO_ROPE,
            window=window(config) if slides else None,
            norm_before=False,
            norm_after=True,
        )

    return describe(family, config, biases=(False, False), qk_norm=True, blocks=by_layer(config, block))


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "exaone4",
    _spec,
    WINDOW | {"sliding_window_pattern"},
    WeightNames(
        parts={
            "post_attention_layernorm": "attention_output_norm",
            "post_feedforward_layernorm": "mlp_output_norm",
        }
    ),
    GGUFForm("exaone4", lambda metadata, config: add_windows(metadata, config, period=4)),
)
