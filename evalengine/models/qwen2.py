"""Qwen2 and Qwen2.5: the plain decoder with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import register_model


@register_model("Qwen2ForCausalLM")
class Qwen2ForCausalLM(DecoderForCausalLM):
    """Always biased on q, k and v, never on the output projection: its config has no field for it."""

    model_type = "qwen2"

    @classmethod
    def attention_biases(cls, config: Any) -> tuple[bool, bool]:
        return True, False
