"""OLMo 2 and 3: each branch's output is normed, not its input, and q's and k's norms span all heads.

OLMo 3 has layers that see a window, with their own RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import WINDOW, by_layer, describe, rope_of, window
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, add_windowed_rope, add_windows
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

_NAMES = WeightNames(parts={"post_feedforward_layernorm": "mlp_output_norm"})
_BLOCK = Block(norm_before=False, norm_after=True, qk_norm_of="vector")


def _spec(family: Family, config: Any, blocks: tuple[Block, ...]) -> ModelSpec:
    rope = blocks[0].rope or rope_of(config, wide=True)
    norm = Norm(eps=0.0, cast_first=False)
    return describe(family, config, qk_norm=True, rope=rope, blocks=blocks, norm=norm)


def _olmo2(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, (_BLOCK,))


def _olmo3(family: Family, config: Any) -> ModelSpec:
    def block(kind: str) -> Block:
        seen = window(config) if kind == "sliding_attention" else None
        return replace(_BLOCK, window=seen, rope=rope_of(config, kind, wide=True))

    return _spec(family, config, by_layer(config, block))


def _gguf3(metadata: Metadata, config: Config) -> None:
    add_windows(metadata, config, period=4)
    add_windowed_rope(metadata, config)


OLMO2 = Family("Olmo2ForCausalLM", "olmo2", _olmo2, weights=_NAMES, gguf=GGUFForm("olmo2"))
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    _olmo3,
    WINDOW | {"rope_by_layer"},
    _NAMES,
    GGUFForm("olmo2", _gguf3, when="attention.sliding_window"),
)
