"""The model families, a module each: importing this package registers them."""

from __future__ import annotations

from evalengine.models.families import (
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    glm,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    minimax,
    mistral,
    mixtral,
    olmo,
    olmoe,
    phi,
    qwen,
    qwen_moe,
    smollm,
    starcoder,
)

__all__ = ["cohere", "deepseek", "ernie", "exaone", "gemma", "glm", "gpt_neox", "gpt_oss", "granite",
           "hunyuan", "llama", "minimax", "mistral", "mixtral", "olmo", "olmoe", "phi", "qwen",
           "qwen_moe", "smollm", "starcoder"]  # fmt: skip
