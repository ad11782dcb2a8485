"""No field of a config.json that transformers looks at goes unread: what it would honour is honoured or refused.

Where a model that runs here asks for another field, a test fails until `hf_config` says what the field means. The other
families' fields are compared up to the version of transformers that the table is of: a new family is no fault here.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    cache_utils,
    masking_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from evalengine.errors import ConfigError
from evalengine.models.config_fields import READ, REFUSED, SAME_AS, TABLE_OF, WITHOUT_EFFECT, unknown_fields
from evalengine.models.decoder import num_parameters
from evalengine.models.describe import WINDOW
from evalengine.models.hf_config import spec_from_json

KNOWN = {*READ, *REFUSED, *SAME_AS, *WITHOUT_EFFECT, *GenerationConfig().to_dict()}
# These fields choose an implementation or what a call returns; the model's arithmetic depends on none of them.
OF_THE_CALL = {"_attn_implementation", "get_text_config", "num_labels", "output_hidden_states", "return_dict"}


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_every_field_of_the_classes_is_known(config: type) -> None:
    declared = {name for name in vars(config)["__annotations__"] if not name.startswith("_")}
    assert len(declared) > 15 and declared <= KNOWN, f"new in transformers: {sorted(declared - KNOWN)}"


@pytest.mark.parametrize("module", [modeling_llama, modeling_qwen2, modeling_qwen3])
def test_every_field_that_the_models_ask_for_is_known(module: Any) -> None:
    fields = asked_for(Path(module.__file__).read_text(encoding="utf-8"))
    assert {"hidden_size", "rms_norm_eps", "rope_parameters", "head_dim"} <= fields
    assert fields <= KNOWN | OF_THE_CALL, f"new in transformers: {sorted(fields - KNOWN - OF_THE_CALL)}"


@pytest.mark.parametrize("function", [masking_utils.create_causal_mask, cache_utils.DynamicCache.__init__])
def test_every_field_that_the_mask_and_the_cache_ask_for_is_known(function: Any) -> None:
    fields = asked_for(textwrap.dedent(inspect.getsource(function)))
    if helper := getattr(cache_utils, "get_layer_types_and_kwargs", None):
        fields |= asked_for(inspect.getsource(helper)) - {"number_of_conv_states"}  # no attention layer reads it
    assert fields <= KNOWN | OF_THE_CALL, f"new in transformers: {sorted(fields - KNOWN - OF_THE_CALL)}"


def asked_for(source: str) -> set[str]:
    """X of every `config.X`, `self.config.X`, `..._config.X` and `getattr(config, "X", ...)`."""

    def is_config(node: ast.expr) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return name == "config" or name.endswith("_config")

    fields = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            fields.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            target, name, *_ = node.args
            if is_config(target) and isinstance(name, ast.Constant):
                fields.add(str(name.value))
    return fields


def text_configs() -> set[type[PretrainedConfig]]:
    """The configuration class of every text model of transformers, and those of the text part of models of several."""
    top = {name: CONFIG_MAPPING[name] for name in CONFIG_MAPPING}
    texts = {top[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in top}
    parts = {part for config in top.values() for name, part in config.sub_configs.items() if name == "text_config"}
    return texts | {part for part in parts if part.__name__ != "AutoConfig"}


@pytest.mark.skipif(
    Version(transformers.__version__).release[:2] > Version(TABLE_OF).release,
    reason=f"the table of fields is of transformers {TABLE_OF}",
)
def test_every_field_of_every_text_model_is_known() -> None:
    """A field that another family computes with must be refused on a Llama, so each must be in the table: those that
    the classes declare, their other names (`attribute_map`), and the old spellings that they take."""
    unknown: dict[str, set[str]] = {}
    configs = text_configs()
    assert len(configs) > 200
    for config in configs:
        # A model of several has its text part's configuration in one of these; what else it declares is of no text.
        is_whole = "text_config" in config.sub_configs
        own = [cls for cls in config.__mro__ if cls.__module__.startswith("transformers.models")]
        names = {name for cls in own for name in vars(cls).get("__annotations__", ())} | set(config.attribute_map)
        if not is_whole:
            taken = re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', inspect.getsource(config))
            names |= {name for name in taken if not name.endswith("_config_dict")}
        for name in names - KNOWN:
            unknown.setdefault(name, set()).add(config.__name__)
    assert not unknown


def test_no_field_is_in_two_groups() -> None:
    groups = [set(READ), set(REFUSED), set(SAME_AS), set(WITHOUT_EFFECT)]
    assert sum(map(len, groups)) == len(set.union(*groups))


# The families that compute least: what another computes is refused here. `test_families` has the others.
CONFIGS = {name: CONFIG_MAPPING[name]().to_dict() for name in ("llama", "qwen2", "qwen3")}


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"is_causal": False},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None},
        {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
        {"quantization_config": {"quant_method": "awq"}},
        {"compression_config": {}},
        {"is_encoder_decoder": True},
        {"attention_chunk_size": 8},
        {"kv_sharing_modes": ["reuse"] * 32},
        {"per_layer_config": {"0": {"num_key_value_heads": 1}}},
        {"text_config": {"hidden_size": 8}},
        {"transformers_weights": "other.safetensors"},
        {"configuration_files": ["config.4.0.json"]},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 0.5, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "attn_factor": 1.5}},
        {
            "rope_parameters": None,
            "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        },
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5, "rope_theta": 1e4}},
        {"logit_scale": 0.0625},
        {"residual_multiplier": 0.22},
        {"attn_logit_softcapping": 50.0},
        {"no_rope_layers": [1, 1, 1, 0]},
        {"query_pre_attn_scalar": 256},
        {"attention_multiplier": 0.0078125},
        {"scale_attn_weights": False},
        {"num_experts": 8},
        {"hidden_activation": "gelu_pytorch_tanh"},
        {"n_head": 16},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_what_would_change_the_forward_pass_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    spec_from_json(CONFIGS[model_type])
    if model_type == "llama" and "mlp_bias" in changes:
        pytest.skip("a Llama may have biases")
    if model_type != "llama" and changes.keys() <= WINDOW | {"use_sliding_window", "max_window_layers"}:
        pytest.skip("Qwen's layers may see a window")
    with pytest.raises(ConfigError):
        spec_from_json({**CONFIGS[model_type], **changes})


def test_a_window_without_a_switch_is_refused_and_one_that_is_off_is_not() -> None:
    with pytest.raises(ConfigError, match="an active sliding window"):
        spec_from_json({**CONFIGS["llama"], "sliding_window": 64})  # the class has no use_sliding_window
    spec_from_json({**CONFIGS["llama"], "sliding_window": None})
    spec = spec_from_json({**CONFIGS["qwen3"], "sliding_window": 64, "use_sliding_window": False})
    assert spec == spec_from_json(CONFIGS["qwen3"])


@pytest.mark.parametrize("kind", ["conv", "linear_attention", "chunked_attention"])
def test_layers_of_another_kind_are_named_and_are_no_window(kind: str) -> None:
    changes = {"layer_types": ["full_attention", kind] * 16, "num_hidden_layers": 32}
    with pytest.raises(ConfigError) as refused:
        spec_from_json({**CONFIGS["qwen3"], **changes})
    assert kind in str(refused.value) and "sliding window" not in str(refused.value)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_fields_of_no_effect_have_none(model_type: str) -> None:
    changes = {"attention_dropout": 0.5, "initializer_range": 0.5, "pretraining_tp": 2, "use_cache": False}
    others = {"num_labels": 10**9, "auto_map": {"AutoConfig": "x.Y"}, "attribute_map": {"hidden_size": "vocab_size"}}
    assert spec_from_json({**CONFIGS[model_type], **changes, **others}) == spec_from_json(CONFIGS[model_type])


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_fields_of_other_families_may_say_that_they_change_nothing(model_type: str) -> None:
    plain = spec_from_json(CONFIGS[model_type])
    neutral = {
        "logit_scale": 1.0,
        "residual_multiplier": 1,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 0.0,
        "no_rope_layers": [1] * 32,
        "num_experts": 0,
        "mlp_only_layers": [],
        "use_mrope": False,
        "hidden_activation": "silu",
        "query_pre_attn_scalar": plain.head_dim,
        "attention_multiplier": round(plain.head_dim**-0.5, 9),
        "n_head": plain.num_heads,
        "d_model": plain.hidden_size,
        "layer_norm_eps": plain.rms_norm_eps,
        "rotary_emb_base": plain.rope.theta,
        "use_qk_norm": plain.qk_norm,
        "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24], "attention_factor": 1.0},
    }
    assert spec_from_json({**CONFIGS[model_type], **neutral}) == plain
    assert unknown_fields({**CONFIGS[model_type], **neutral}) == []


def test_every_refused_field_of_a_file_is_named_and_removing_it_is_not_advised() -> None:
    """Without it the file would describe another model, which runs."""
    with pytest.raises(ConfigError) as caught:
        spec_from_json({**CONFIGS["llama"], "logit_scale": 2.0, "embedding_multiplier": 12, "d_model": 1})
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        f"LlamaForCausalLM: {name}" for name in ("embedding_multiplier", "logit_scale", "d_model")
    ]
    assert all("check model_type" in p and "remove" not in p for p in caught.value.problems)
    with pytest.raises(ConfigError) as caught:  # of another model only that is said
        spec_from_json({**CONFIGS["llama"], "model_type": "phi", "logit_scale": 2.0, "architectures": None})
    assert len(caught.value.problems) == 1


LLAMA_3_2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "vocab_size": 49152,
}  # fmt: skip
QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.43.1", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip

TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.35.0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
R1_DISTILL_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
    "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.44.0", "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "million_weights"),
    [(LLAMA_3_2, 1236), (SMOLLM2, 135), (QWEN2_5, 494), (QWEN3, 596), (TINYLLAMA, 1100), (R1_DISTILL_QWEN, 1777)],
    ids=["llama-3.2-1b", "smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "tinyllama-1.1b", "r1-distill-qwen-1.5b"],
)
def test_configurations_of_known_models_are_read(raw: dict[str, Any], million_weights: int) -> None:
    spec = spec_from_json(raw)
    assert round(num_parameters(spec) / 1e6) == million_weights
    assert spec.rope.theta == raw["rope_theta"] and spec.dtype == torch.bfloat16
    ends = raw["eos_token_id"]
    assert spec.eos_token_ids == (tuple(ends) if isinstance(ends, list) else (ends,))
    assert unknown_fields(raw) == [] == unknown_fields(CONFIGS[raw["model_type"]])
