"""Llama 2 and 3, SmolLM2 and other checkpoints of class LlamaForCausalLM."""

from __future__ import annotations

from typing import Any

from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import register_model


@register_model("LlamaForCausalLM")
class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder. `attention_bias`, where set, covers q, k, v and the output projection."""

    model_type = "llama"
    gguf_interleaved_rope = True  # llama.cpp's converter reorders the rows of q and k for this architecture only

    @classmethod
    def attention_biases(cls, config: Any) -> tuple[bool, bool]:
        return config.attention_bias, config.attention_bias
