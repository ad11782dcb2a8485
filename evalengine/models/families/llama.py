"""Llama 2 and 3, SmolLM2 and other checkpoints of class LlamaForCausalLM: the plain decoder."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import describe
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.spec import ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    """`attention_bias`, where set, covers q, k, v and the output projection."""
    return describe(family, config)


LLAMA = Family("LlamaForCausalLM", "llama", _spec, gguf=GGUFForm("llama", permuted=True))
