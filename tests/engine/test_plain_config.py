"""Configurations that are read without transformers equal its classes', or are left to them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from evalengine.errors import ConfigError
from evalengine.models import hf_config
from evalengine.models.hf_config import (
    PLAIN_TYPES,
    _configuration,
    _json_problems,
    _read,
    plain_config,
    spec_from_json,
)
from evalengine.models.registry import family_of_type

SIZES = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "bos_token_id": None,
    "eos_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
OWN = {
    "llama": {"rope_theta": 5e5, "mlp_bias": False}, "mistral": {"sliding_window": 128, "head_dim": 32}, "olmo2": {},
    "granite": dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 2.0
    ),
    "qwen2": {"use_sliding_window": False, "sliding_window": 64}, "qwen3": {"head_dim": 64},
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"
CHANGES: dict[str, list[Any]] = {
    "hidden_act": ["swish", "gelu", None, 3], "num_key_value_heads": [None, 4, 3, True], "head_dim": [None, 32, 7, "x"],
    "rope_theta": [500000, 1e6, None, "a", True], "rms_norm_eps": [1e-5, 1, 0.0], "attention_bias": [True, None],
    "rope_scaling": [{}, {"type": "linear", "factor": 2.0}, LLAMA3, {**LLAMA3, "original_max_position_embeddings": 512},
                     {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "yarn", "factor": 4.0}, {"x": 1},
                     {"type": "default", "rope_theta": 3.0}, {"rope_type": ["a"]}, {"rope_type": "default", "x": 1}],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 1e5}, {"rope_type": "linear", "factor": 4}, None],
    "sliding_window": [128, 0, None, "a"], "use_sliding_window": [True, False, None, 0], "max_window_layers": [0, None],
    "layer_types": [None, [FULL] * 4, [SLIDING] * 4, [FULL] * 3, "a"], "tie_word_embeddings": [True, False, None, 1],
    "bos_token_id": [1, None, [1]], "eos_token_id": [1, [1, 2], None], "torch_dtype": ["float32", None, "nope"],
    "dtype": ["float16", None], "partial_rotary_factor": [0.5, 1.0, None], "mlp_bias": [True, None],
    "original_max_position_embeddings": [128, None], "quantization_config": [None, {"quant_method": "awq"}],
    "architectures": [["LlamaForCausalLM"], ["Qwen3ForCausalLM"], None], "num_attention_heads": [3, 8, 0],
    "logits_scaling": [1, None, 0], "is_causal": [True, False], "pad_token_id": [3], "rope_local_base_freq": [1.0],
}  # fmt: skip
ABSENT = object()


def outcome(raw: dict[str, Any]) -> Any:
    try:
        return spec_from_json(raw)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("model_type", PLAIN_TYPES)
def test_configurations_equal_transformers(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, family, direct = random.Random(model_type), family_of_type(model_type), 0
    read = _read(family) - {"is_causal"}
    for number in range(80):
        raw = {"model_type": model_type, **SIZES, **OWN[model_type]}
        for name in case.sample([*raw][1:], case.choice([0, 0, 0, 1, 2])):
            del raw[name]
        raw |= {name: case.choice(CHANGES[name]) for name in case.sample([*CHANGES], min(number, case.choice([1, 2])))}
        ours = outcome(raw)
        with monkeypatch.context() as patched:
            patched.setattr(hf_config, "plain_config", lambda raw, read: None)
            assert ours == outcome(raw), raw
        if any(_json_problems(raw, family)) or (config := plain_config(raw, read)) is None:
            continue
        theirs, direct = _configuration(raw, family), direct + 1
        for name in read - {"torch_dtype", "rope_scaling", "rope_theta"}:  # the class has these by other names
            assert getattr(config, name, ABSENT) == getattr(theirs, name, ABSENT), (name, raw)
    assert direct > 20
