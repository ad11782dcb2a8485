"""The supported models: importing this package registers them."""

from __future__ import annotations

from evalengine.models.llama import LlamaForCausalLM
from evalengine.models.qwen2 import Qwen2ForCausalLM
from evalengine.models.qwen3 import Qwen3ForCausalLM

__all__ = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
