"""Qwen2 and Qwen2.5: the plain decoder with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import register_model


@register_model("Qwen2ForCausalLM")
class Qwen2ForCausalLM(DecoderForCausalLM):
    """The decoder with biases on q, k and v and none on the output projection, always: the config has no such field."""

    model_type = "qwen2"

    @classmethod
    def attention_biases(cls, config: Any) -> tuple[bool, bool]:
        return True, False
