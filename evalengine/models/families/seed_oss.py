"""Seed-OSS: a Llama with biases on q, k and v, and its own head size."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe
from evalengine.models.gguf_form import Config, GGUFForm, Metadata
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    biases = (config.attention_bias, config.attention_out_bias)
    return describe(family, config, biases=biases, blocks=(Block(mlp_bias=config.mlp_bias),))


def _gguf(metadata: Metadata, config: Config) -> None:
    config["attention_out_bias"] = metadata.biased("attn_output")


SEED_OSS = Family(
    "SeedOssForCausalLM",
    "seed_oss",
    _spec,
    frozenset({"attention_out_bias", "mlp_bias"}),
    gguf=GGUFForm("seed_oss", _gguf, names={"post_attention_norm": "post_attention_layernorm"}),
)
