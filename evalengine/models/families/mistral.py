"""Mistral 7B, all of whose layers see a window or none does, and Ministral 3, whose RoPE is stretched by YaRN.

Beyond `original_max_position_embeddings` Ministral 3 multiplies queries by 1 + beta * ln(1 + floor(position /
original)), after RoPE; up to there this is 1. Checkpoints with a part for images
(Mistral3ForConditionalGeneration) have its text part's tensors below `language_model.`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.models.describe import describe, window
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import OF_TEXT_PART


def _mistral(family: Family, config: Any) -> ModelSpec:
    block = Block() if config.sliding_window is None else Block(window=window(config))
    return describe(family, config, biases=(False, False), blocks=(block,))


def _ministral3(family: Family, config: Any) -> ModelSpec:
    spec = _mistral(family, config)
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    return replace(spec, rope=replace(spec.rope, query_beta=beta)) if beta else spec


def _temperature(metadata: Metadata, config: Config) -> None:
    config["sliding_window"] = metadata.integer("attention.sliding_window") or None
    if beta := metadata.number("attention.temperature_scale"):
        config["rope_parameters"]["llama_4_scaling_beta"] = beta


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    _mistral,
    frozenset({"sliding_window"}),
    # A file without a window, which is each that has all keys, is a Llama's.
    gguf=GGUFForm(
        "llama",
        named(attention__sliding_window="sliding_window"),
        when="attention.sliding_window",
        permuted=True,
    ),
)
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    "ministral3",
    _ministral3,
    frozenset({"sliding_window", "llama_4_scaling_beta"}),
    gguf=GGUFForm("mistral3", _temperature, permuted=True),
)
MISTRAL3 = Family("Mistral3ForConditionalGeneration", "mistral3", weights=OF_TEXT_PART, wraps="mistral")
