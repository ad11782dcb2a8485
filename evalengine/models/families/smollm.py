"""SmolLM3: a Llama in which every fourth layer has no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.models.describe import WINDOW, describe, windows
from evalengine.models.file_values import shown
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec

_READS = WINDOW | {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "mlp_bias"}


def _spec(family: Family, config: Any) -> ModelSpec:
    layers, turned = config.num_hidden_layers, config.no_rope_layers
    if not isinstance(turned, list) or len(turned) != layers or not all(flag in (0, 1) for flag in turned):
        raise ConfigError(f"no_rope_layers={shown(turned)}: must have 0 or 1 for each of {layers} layers")
    seen = windows(config, Block(mlp_bias=config.mlp_bias))
    blocks = tuple(replace(seen[i % len(seen)], rope=None if turned[i] else NO_ROPE) for i in range(layers))
    return describe(family, config, blocks=blocks)


# Which layers turn is not in a GGUF file's metadata: as by default, all but each fourth.
SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", _spec, _READS, gguf=GGUFForm("smollm3", permuted=True))
