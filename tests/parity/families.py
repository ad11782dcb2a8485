"""A tiny random model of each family, made by transformers: `CASES`, and the folder of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 211
WINDOW = 9  # Every prompt of more tokens crosses it.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 148,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PYTHIA = {"hidden_size": 192, "num_key_value_heads": 6}  # It has as many KV heads as heads, and no head_dim of its own.
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + i / 8 for i in range(12)],
    "long_factor": [4.0 + i for i in range(12)],
}
MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
# Every prompt is beyond the original length; the longest is that of SIZES.
NEAR = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 16}
OF_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
FACTORS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
}
EXPERTS = {"moe_intermediate_size": 52, "num_experts": 6, "num_experts_per_tok": 3}
UNTRUNCATED = {**YARN, "truncate": False}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 52,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "n_shared_experts": 2,
    "attention_bias": True,
}
LATENT_HEADS = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 14,
}
LATENT = {
    **LATENT_HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 52,
    "routed_scaling_factor": 1.5,
}
ERNIE = {
    "head_dim": None,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 52,
    "moe_layer_interval": 2,
    "moe_layer_start_index": 1,
}
DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 3,
}
SHORT = {"head_dim": None, "conv_L_cache": 3, "block_multiple_of": 4, "tie_word_embeddings": True}
MAMBA = {
    **FACTORS,
    "head_dim": None,
    "num_local_experts": 0,
    "shared_intermediate_size": 148,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,  # older transformers norm all groups as one
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
FALCON = {
    "head_dim": None,
    "mamba_d_ssm": 192,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.9, 0.7],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.6,
    "ssm_multipliers": [0.35, 0.25, 0.7, 0.5, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
NEMOTRON = {
    "num_hidden_layers": None,  # it follows from the kinds
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
}
OLMO_HYBRID = {
    "head_dim": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,  # as many channels of v as of q: transformers saves the convolution in equal parts
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
BY_LAYER = {"full_attention": {**YARN, "factor": 8.0}, "sliding_attention": PLAIN}

# name -> (model_type, what its configuration has beside SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {**NEAR, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.25}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW, "rope_parameters": {**NEAR, "attention_factor": 1.25}}),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, **CAPS}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}}),
    "phi3-long": ("phi3", {"hidden_size": 192, "rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "rope_parameters": BY_LAYER}),
    "apertus": ("apertus", {"head_dim": None, "attention_bias": True}),
    "smollm3": ("smollm3", {"rope_parameters": {**NEAR, "beta_fast": 2, "beta_slow": 1}}),
    "granite": ("granite", FACTORS),
    "exaone4": ("exaone4", {"sliding_window": WINDOW}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "glm4": ("glm4", {}),
    "hunyuan": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "ernie": ("ernie4_5", {"use_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "logit_scale": 0.25}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "pythia": ("gpt_neox", PYTHIA),
    "pythia-in-turn": ("gpt_neox", {**PYTHIA, "use_parallel_residual": False, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2-window": ("qwen2", {**OF_QWEN, "rope_parameters": NEAR}),
    "qwen3-window": ("qwen3", {**OF_QWEN, "rope_parameters": {**NEAR, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "seed-oss": ("seed_oss", {}),
    "cwm": ("cwm", {"sliding_window": WINDOW}),
    "helium": ("helium", {"head_dim": 16}),
    "stablelm": ("stablelm", {"head_dim": None, "use_qkv_bias": True}),
    "stablelm-12b": ("stablelm", {"head_dim": None, "use_parallel_residual": True, "qk_layernorm": True}),
    "command-r": ("cohere", {"head_dim": None, "logit_scale": 0.25}),
    "command-r-plus": ("cohere", {"head_dim": None, "logit_scale": 0.25, "use_qk_norm": True}),
    "glm": ("glm", {}),
    "gemma": ("gemma", {}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen2-moe": ("qwen2_moe", {"head_dim": None, **OF_QWEN, **EXPERTS, "shared_expert_intermediate_size": 60}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "sliding_window": WINDOW}),
    "olmoe": ("olmoe", {"head_dim": None, "num_experts": 6, "num_experts_per_tok": 3}),
    "gpt-oss": ("gpt_oss", {"sliding_window": WINDOW, "num_local_experts": 6, "rope_parameters": UNTRUNCATED}),
    "granite-moe": ("granitemoe", {"head_dim": None, **FACTORS, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "glm4-moe": ("glm4_moe", GLM),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1}),
    "deepseek-v2-greedy": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 1, "rope_parameters": MINISTRAL_YARN}),
    "deepseek-v3-plain": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "rope_interleave": False, "v_head_dim": 24}),
    "glm4-moe-lite": ("glm4_moe_lite", {**LATENT, "attention_bias": True}),
    "ernie-moe": ("ernie4_5_moe", ERNIE),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 16}),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 60}),
    "qwen3-next": ("qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 60}),
    "lfm2": ("lfm2", {**SHORT, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "lfm2-moe": ("lfm2_moe", {**EXPERTS, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "granite-hybrid": ("granitemoehybrid", {**MAMBA, "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    "granite-hybrid-moe": ("granitemoehybrid", {**MAMBA, "num_local_experts": 6, "num_experts_per_tok": 3,
                           "intermediate_size": 52, "layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    "falcon-h1": ("falcon_h1", FALCON),
    "falcon-h1-normed": ("falcon_h1", {**FALCON, "mamba_rms_norm": True}),
    "falcon-h1-unscaled": ("falcon_h1", {**FALCON, "ssm_out_multiplier": 1.0}),
    "nemotron-h": ("nemotron_h", NEMOTRON),
    "olmo-hybrid": ("olmo_hybrid", OLMO_HYBRID),
    "granite-4-dense": ("granitemoehybrid", {**MAMBA, "layer_types": ["attention"] * 4}),
    "qwen3-moe-mixed": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "rope_parameters": NEAR}),
}  # fmt: skip


def make(name: str, folder: Path) -> PreTrainedModel:
    """The random model of a case, saved in the folder."""
    return random_model(*case(name), folder)


def case(name: str) -> tuple[str, dict[str, Any]]:
    """A case's model_type, and its configuration beside SIZES."""
    model_type, more = CASES[name]
    return model_type, {"head_dim": None, **more} if model_type == "gpt_neox" else more


def configuration(model_type: str, more: dict[str, Any]) -> PretrainedConfig:
    """SIZES and `more`, which leaves out those that are None there. Skip the test if transformers lacks the type."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {model_type}")
    left_out = {name for name in SIZES if name in more and more[name] is None}
    return CONFIG_MAPPING[model_type](**{n: v for n, v in {**SIZES, **more}.items() if n not in left_out})


def random_model(model_type: str, more: dict[str, Any], folder: Path) -> PreTrainedModel:
    """A random model in float32, with random biases and norm weights, too. Its experts are multiplied one by one: the
    default form takes no float64.

    more: its configuration beside SIZES (`configuration`).
    """
    return saved_random(configuration(model_type, more), folder)


def saved_random(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """`random_model` of a configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("norm.weight"):
                # Gemma's norms add 1 to their weights themselves.
                one = "norm" in parameter_name and not config.model_type.startswith("gemma")
                parameter.copy_(torch.randn_like(parameter) * 0.3 + one)
            if parameter_name.endswith("A_log"):
                # As in trained models: from heads that forget within a few tokens to heads that remember for hundreds.
                # With the slow ones missing, no output depends on what a state was 64 tokens ago.
                parameter.copy_(torch.linspace(0, -7, parameter.numel()).view_as(parameter))
        for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor_name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder)
    return model
