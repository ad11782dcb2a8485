"""Tiny random models of classes that no family of ours computes, which transformers' own module runs: `CASES`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.parity.families import LATENT_HEADS, OF_QWEN, PLAIN, WINDOW, random_model

HEADS = {"head_dim": None, "num_key_value_heads": None}  # They are left to the class, whose heads have no groups.
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 52}
LATENT = {
    **LATENT_HEADS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 52,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

MIMO = {
    "num_attention_heads": 8,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": WINDOW,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 52,
    "num_hidden_layers": 6,
}

# name -> (model_type, what its configuration has beside SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", HEADS),
    "opt": ("opt", {**HEADS, "ffn_dim": 148, "word_embed_proj_dim": 96}),
    "phi": ("phi", {"head_dim": None, "partial_rotary_factor": 0.5}),
    "olmo": ("olmo", {"head_dim": None}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "exaone": ("exaone", {"head_dim": None}),
    "granitemoeshared": ("granitemoeshared", {"head_dim": None, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "internlm3": ("internlm3", {}),
    "nanochat": ("nanochat", {"head_dim": None}),
    "persimmon": ("persimmon", {**HEADS, "qk_layernorm": False}),
    # Its layers with a window have twice as many keys as the others.
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", {"head_dim": None, "num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "vaultgemma": ("vaultgemma", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gpt_oss": ("gpt_oss", {"sliding_window": WINDOW, "num_local_experts": 6, "rope_parameters": PLAIN}),
    "qwen2_moe": ("qwen2_moe", {"head_dim": None, **OF_QWEN, **EXPERTS, "shared_expert_intermediate_size": 60}),
}


def make(name: str, folder: Path) -> PreTrainedModel:
    """The random model of a case, saved in the folder."""
    model_type, more = CASES[name]
    return random_model(model_type, more, folder)
