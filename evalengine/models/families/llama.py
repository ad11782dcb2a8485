"""Llama 2 and 3, SmolLM2 and other checkpoints of class LlamaForCausalLM: the plain decoder."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    """`attention_bias`, where set, covers q, k, v and the output projection."""
    return describe(family, config, blocks=(Block(mlp_bias=config.mlp_bias),))


LLAMA = Family("LlamaForCausalLM", "llama", _spec, frozenset({"mlp_bias"}), gguf=GGUFForm("llama", permuted=True))
