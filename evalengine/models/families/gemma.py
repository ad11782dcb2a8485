"""Gemma: norm weights stored minus one, an embedding times sqrt(hidden size), and a GELU.

Of Gemma 1 and CodeGemma transformers takes the tanh's approximation of a GELU, whatever name the file has for it.
Gemma 2 and 3 have norms around both branches. Gemma 2 caps its scores and its logits; Gemma 3 norms each head's query
and key instead, and its layers that see a window have their own RoPE. Checkpoints of 4B and more have a part for
images, whose tensors no text needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.layers.variants import Norm
from evalengine.models.describe import WINDOW, activation_of, by_layer, describe, rope_of, window
from evalengine.models.file_values import shown
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, add_windowed_rope, add_windows, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import OF_TEXT_PART, WeightNames

_READS = WINDOW | {
    *("hidden_activation", "hidden_act", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
}
_NORM = Norm(eps=0.0, offset=1.0, cast_first=False)
_PARTS = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def _gemma1(family: Family, config: Any) -> ModelSpec:
    blocks = (Block(activation=activation_of(config)),)
    return describe(family, config, blocks=blocks, norm=_NORM, embedding_scale=config.hidden_size**0.5)


def _spec(family: Family, config: Any, *, qk_norm: bool) -> ModelSpec:
    named = getattr(config, "hidden_act", None)  # also in files; transformers reads only `hidden_activation`
    if named not in (None, config.hidden_activation):
        raise ConfigError(f"hidden_act={shown(named)} contradicts hidden_activation={shown(config.hidden_activation)}")

    def block(kind: str) -> Block:
        return Block(
            rope=rope_of(config, kind) if qk_norm else None,
            window=window(config) if kind == "sliding_attention" else None,
            softcap=config.attn_logit_softcapping,
            scale=config.query_pre_attn_scalar**-0.5,
            norm_after=True,
            activation=activation_of(config, "hidden_activation"),
        )

    blocks = by_layer(config, block)
    return describe(
        family,
        config,
        qk_norm=qk_norm,
        rope=blocks[0].rope,
        blocks=blocks,
        norm=_NORM,
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=config.final_logit_softcapping,
    )


def _gemma2(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, qk_norm=False)


def _gemma3(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, qk_norm=True)


def _add_scale(metadata: Metadata, config: Config, largest: int) -> None:
    """`query_pre_attn_scalar`, which files lack: a head's size but in the model of 27B, recognised by its number of
    layers, and the caps."""
    of_27b = config["num_hidden_layers"] == largest
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    config["query_pre_attn_scalar"] = hidden // heads if of_27b else config["head_dim"]
    named(
        attn_logit_softcapping="attn_logit_softcapping",
        final_logit_softcapping="final_logit_softcapping",
    )(metadata, config)


def _gguf2(metadata: Metadata, config: Config) -> None:
    _add_scale(metadata, config, 46)
    add_windows(metadata, config, period=2, default=4096)


def _gguf3(metadata: Metadata, config: Config) -> None:
    _add_scale(metadata, config, 62)
    add_windows(metadata, config, period=6)
    add_windowed_rope(metadata, config, theta=10000.0)


GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    _gemma1,
    frozenset({"hidden_act", "hidden_activation"}),
    gguf=GGUFForm("gemma", norms_plus_one=True),
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    _gemma2,
    _READS,
    WeightNames(parts=_PARTS),
    GGUFForm("gemma2", _gguf2, norms_plus_one=True),
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    _gemma3,
    _READS | {"rope_by_layer", "rope_local_base_freq", "sliding_window_pattern"},
    WeightNames(parts=_PARTS),
    GGUFForm("gemma3", _gguf3, norms_plus_one=True),
)
GEMMA3_IMAGES = Family(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    weights=replace(OF_TEXT_PART, parts=_PARTS),
    wraps="gemma3_text",
)
