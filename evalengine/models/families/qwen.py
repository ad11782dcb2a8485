"""Qwen2, which always has biases on q, k and v, and Qwen3, which norms each head's query and key before RoPE.

Either may have layers that see a window.
"""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import WINDOW, describe, windows
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec

_READS = WINDOW | {"use_sliding_window", "max_window_layers"}


def _qwen2(family: Family, config: Any) -> ModelSpec:
    return describe(family, config, biases=(True, False), blocks=windows(config, Block()))


def _qwen3(family: Family, config: Any) -> ModelSpec:
    return describe(family, config, qk_norm=True, blocks=windows(config, Block()))


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _qwen2, _READS, gguf=GGUFForm("qwen2"))
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _qwen3, _READS, gguf=GGUFForm("qwen3"))
