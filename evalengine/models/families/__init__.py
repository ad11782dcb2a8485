"""The model families, a module each: importing this package registers them."""

from __future__ import annotations

from evalengine.models.families import (
    cohere,
    deepseek,
    ernie,
    exaone,
    falcon_h1,
    gemma,
    glm,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    lfm2,
    llama,
    minimax,
    mistral,
    mixtral,
    nemotron_h,
    olmo,
    olmo_hybrid,
    olmoe,
    phi,
    qwen,
    qwen_hybrid,
    qwen_moe,
    smollm,
    starcoder,
)

__all__ = ["cohere", "deepseek", "ernie", "exaone", "falcon_h1", "gemma", "glm", "gpt_neox", "gpt_oss", "granite",
           "granite_hybrid", "hunyuan", "lfm2", "llama", "minimax", "mistral", "mixtral", "nemotron_h", "olmo",
           "olmo_hybrid", "olmoe", "phi", "qwen", "qwen_hybrid", "qwen_moe", "smollm", "starcoder"]  # fmt: skip
