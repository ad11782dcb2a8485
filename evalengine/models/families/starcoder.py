"""StarCoder2: layer norms, biases everywhere, and a feed-forward without a gate."""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import LAYER_NORM
from evalengine.models.describe import activation_of, describe, window
from evalengine.models.gguf_form import Config, GGUFForm, Metadata
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    block = Block(
        window=None if config.sliding_window is None else window(config),
        activation=activation_of(config),
        gated=False,
        mlp_bias=config.use_bias,
    )
    biases = config.use_bias, config.use_bias
    return describe(family, config, biases=biases, eps="norm_epsilon", blocks=(block,), norm=LAYER_NORM)


def _gguf(metadata: Metadata, config: Config) -> None:
    """llama.cpp's converter writes no window; such a file has none."""
    config["use_bias"] = metadata.biased("attn_q")
    config["sliding_window"] = metadata.integer("attention.sliding_window") or None


STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    _spec,
    frozenset({"sliding_window", "hidden_act", "norm_epsilon", "use_bias"}),
    WeightNames(parts={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    GGUFForm("starcoder2", _gguf, eps="norm_epsilon"),
    implied={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
)
