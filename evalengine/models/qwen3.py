"""Qwen3: the plain decoder with an RMS norm over each head's query and key, before RoPE."""

from __future__ import annotations

from typing import Any

from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import register_model


@register_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(DecoderForCausalLM):
    """The decoder with q and k norms. `attention_bias`, where set, covers q, k, v and the output projection."""

    model_type = "qwen3"
    qk_norm = True

    @classmethod
    def attention_biases(cls, config: Any) -> tuple[bool, bool]:
        return config.attention_bias, config.attention_bias
