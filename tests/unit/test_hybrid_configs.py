"""Configurations of recurrent hybrids as they are published are read; those that no layer computes, refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evalengine.errors import ConfigError
from evalengine.harness.identity import plain_spec
from evalengine.models.decoder import num_parameters
from evalengine.models.hf_config import from_hf, spec_from_json
from evalengine.models.rope import NO_ROPE
from tests.parity.families import CASES, case, configuration

# Of Nemotron-H-8B, with which fields of transformers 4 that its code does not ask for.
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_head_dim": 128, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
    "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52,
    "num_key_value_heads": 8, "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375, "bos_token_id": 1, "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "max_position_embeddings": 16384, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}  # fmt: skip


@pytest.mark.parametrize(("raw", "million_weights", "recurrent"), [(NEMOTRON_H, 8101, 24), (FALCON_H1, 521, 36)])
def test_published_configurations_are_read(raw: dict[str, Any], million_weights: int, recurrent: int) -> None:
    spec = spec_from_json(raw)
    assert round(num_parameters(spec) / 1e6) == million_weights and len(spec.recurrences) == recurrent
    assert spec.dtype == torch.bfloat16 and sum(spec.block(i).attends for i in range(spec.num_layers)) in (4, 36)


def test_olmo_hybrid_has_no_positions_where_its_file_says_so() -> None:
    raw = {**configuration(*CASES["olmo-hybrid"]).to_dict(), "rope_parameters": {"rope_theta": None}}
    assert spec_from_json(raw).rope == NO_ROPE != spec_from_json({**raw, "rope_parameters": None}).rope


@pytest.mark.parametrize("name", CASES)
def test_every_familys_spec_goes_into_a_runs_identity(name: str) -> None:
    """As plain JSON, which has no infinity, such as the upper limit of a time step that has none."""
    assert plain_spec(from_hf(configuration(*case(name))))["architecture"]


REFUSED = [
    (NEMOTRON_H, {"hybrid_override_pattern": "ME*E", "num_hidden_layers": 4}, "layers of moe are not supported"),
    (NEMOTRON_H, {"hybrid_override_pattern": "M-", "num_hidden_layers": 2}, "some layer must have attention"),
    (NEMOTRON_H, {"sliding_window": 64}, "sliding_window"),
    (NEMOTRON_H, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu': only silu"),
    (NEMOTRON_H, {"mlp_hidden_act": "tanh"}, "mlp_hidden_act='tanh': supported are silu"),
    (NEMOTRON_H, {"n_groups": 7}, "Mamba2.num_heads=128: must be a multiple of num_groups=7"),
    (NEMOTRON_H, {"conv_kernel": 1}, "Mamba2.taps=1: must be an integer from 2"),
    (FALCON_H1, {"ssm_multipliers": [1.0, 2.0]}, "must be 5 positive numbers"),
    (FALCON_H1, {"mlp_multipliers": [1.0, 0.0]}, "must be 2 positive numbers"),
    (FALCON_H1, {"projectors_bias": True}, "projectors_bias, mamba_proj_bias"),
    (FALCON_H1, {"key_multiplier": -1.0}, "multipliers.key=-1.0: must be a positive number"),
]


@pytest.mark.parametrize(("raw", "change", "words"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(raw: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_from_json({**raw, **change})
