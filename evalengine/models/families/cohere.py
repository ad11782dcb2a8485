"""Cohere's Command R and R7B: attention and feed-forward take the same layer norm's output and are added together.

Layers turn pairs side by side; of R7B only those that see a window do, the others have no positions. Command R+ norms
each head of q and k by separate weights.
"""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import WINDOW, by_layer, describe, rope_of, window
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, add_windows, named
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec

_EPS = "layer_norm_eps"


def _spec(family: Family, config: Any, blocks: tuple[Block, ...]) -> ModelSpec:
    rope, norm = rope_of(config, interleaved=True, wide=True), Norm(eps=0.0, kind="layer", cast_first=False)
    scale, qk_norm = config.logit_scale, blocks[0].qk_norm_of == "each head"
    return describe(family, config, qk_norm=qk_norm, rope=rope, eps=_EPS, blocks=blocks, norm=norm, logits_scale=scale)


def _command_r(family: Family, config: Any) -> ModelSpec:
    block = Block(parallel="one norm", qk_norm_of="each head" if config.use_qk_norm else "head")
    return _spec(family, config, (block,))


def _r7b(family: Family, config: Any) -> ModelSpec:
    def block(kind: str) -> Block:
        slides = kind == "sliding_attention"
        return Block(rope=None if slides else NO_ROPE, window=window(config) if slides else None, parallel="one norm")

    return _spec(family, config, by_layer(config, block))


def _gguf(metadata: Metadata, config: Config) -> None:
    named(logit_scale="logit_scale")(metadata, config)
    add_windows(metadata, config, period=4)


COMMAND_R = Family(
    "CohereForCausalLM",
    "cohere",
    _command_r,
    frozenset({_EPS, "logit_scale", "use_qk_norm"}),
    gguf=GGUFForm("command-r", named(logit_scale="logit_scale"), eps=_EPS),
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    "cohere2",
    _r7b,
    WINDOW | {_EPS, "logit_scale", "sliding_window_pattern"},
    gguf=GGUFForm("cohere2", _gguf, eps=_EPS),
    implied={
        **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), (True,)),
        "layer_switch": (4,),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
    },
)
