"""Published config.json files are read as transformers reads them: each field, the spec, and a tiny model's logits."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from evalengine.engine.load.hf_folder import folder_spec
from evalengine.engine.load.loader import load_model
from evalengine.errors import ConfigError
from evalengine.layers import create_ops
from evalengine.models.config_fields import READ, WITHOUT_EFFECT
from evalengine.models.hf_config import from_hf, spec_from_json, unread_fields
from evalengine.models.registry import MODEL_REGISTRY
from tests.parity.families import saved_random
from tests.parity.paged import PagedRunner
from tests.parity.published import PUBLISHED, VOCAB, family_of, native_families, tiny
from tests.parity.random_models import without_tokenizer

# What no native family computes yet -> a part of the message.
REJECTED = {
    "Nanbeige/Llama with dynamic": "'rope_type': 'dynamic'.*: supported are default, linear, llama3 and yarn scaling",
    "Nemotron-3-Nano-30B-A3B": "layers of moe are not supported",
    "Qwen2.5-VL-3B (text part)": "model type qwen2_5_vl is not supported",
    "Qwen3-VL-2B (text part)": "model type qwen3_vl is not supported",
    "Gemma-3n / Gemma 4 wrappers": "model type gemma4 is not supported",
}
ACCEPTED = [name for name in PUBLISHED if name not in REJECTED]
# Native families without a published file in the collection. A new family is not added here: add its file.
NOT_COLLECTED = {
    *("cohere2", "glm4", "olmo_hybrid", "qwen3_5_moe_text"),
}
# Fields that no model here computes and that a warning names: the file's code, which is not run, and attention in
# chunks, which is plain attention up to the original length; transformers has only that.
WARNED = {"auto_map", "dual_chunk_attention_config"}
ALTERED = {  # fields of published files with other values than those that a class has by itself
    "gemma-3-1b-it": {"rope_local_base_freq": 300, "sliding_window_pattern": 3},
    "gemma-3-270m": {"rope_local_base_freq": 300.0},
    "gemma-2-2b": {"hidden_act": "gelu", "hidden_activation": "gelu"},
    "gemma-2b (v1)": {"hidden_act": "silu"},
    "EXAONE-4.0-32B": {"layer_types": None, "sliding_window_pattern": 3},
    "GLM-4.7-Flash": {"first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5},
    "internlm2-like llama, mlp_bias": {"attention_bias": False},
    "Llama-3.2-1B": {"hidden_act": "swish"},
    "Qwen3-8B": {"hidden_act": "swish"},
    "starcoder2-3b": {"hidden_act": "gelu_new"},
    "Apertus-8B-Instruct-2509": {"hidden_act": "relu2"},
    "c4ai-command-r-v01": {"use_qk_norm": True},
    "stablelm-2-1_6b": {"qk_layernorm": True},
}
COHERE2 = {  # of c4ai-command-r7b-12-2024, in tiny sizes
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "bos_token_id": 5, "eos_token_id": 7, "head_dim":
    16, "hidden_act": "silu", "hidden_size": 96, "initializer_range": 0.2, "intermediate_size": 148, "layer_norm_eps":
    1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "model_type": "cohere2",
    "num_attention_heads": 6, "num_hidden_layers": 8, "num_key_value_heads": 2, "order_of_interleaved_layers":
    "local_attn_first", "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct":
    1.0, "sliding_window": 9, "sliding_window_pattern": 2, "torch_dtype": "float32", "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": VOCAB,
}  # fmt: skip


def read_by_transformers(raw: dict[str, Any], folder: Path) -> Any:
    """transformers' configuration of a file, with its architecture's text part only."""
    (folder / "config.json").write_text(json.dumps(raw))
    return AutoConfig.from_pretrained(folder).get_text_config()


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_field_that_transformers_reads_is_left_out(name: str, tmp_path: Path) -> None:
    """The spec of the fields that are read here equals that of transformers' configuration of the whole file."""
    raw = PUBLISHED[name]
    spec, config = spec_from_json(raw), read_by_transformers(raw, tmp_path)
    config.architectures = None
    config.dtype = config.dtype or spec.dtype  # of a file of several parts, which says it once
    config.eos_token_id = raw.get("eos_token_id", config.eos_token_id)
    theirs = from_hf(config)
    assert dataclasses.replace(spec, architecture=theirs.architecture) == theirs
    assert {*unread_fields(raw)} <= WARNED


@pytest.mark.parametrize("name", REJECTED)
def test_what_no_family_computes_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=REJECTED[name]) as caught:
        spec_from_json(PUBLISHED[name])
    assert len(caught.value.problems) == 1 and "remove" not in str(caught.value)


BY_THE_MODULE = {  # what transformers' own module computes where the native family does not
    "another activation": ("Llama-3.2-1B", {"hidden_act": "gelu"}),
    "an activation of no family": ("starcoder2-3b", {"hidden_act": "gelu_fast"}),
}


@pytest.mark.parametrize("case", BY_THE_MODULE)
def test_transformers_module_runs_what_the_family_does_not_compute(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, more = BY_THE_MODULE[case]
    raw = tiny(PUBLISHED[name]) | more
    ours, theirs = logprobs_of_both(raw, tmp_path)
    assert float((ours - theirs).square().mean().sqrt()) < 3e-4 * float(theirs.std())
    (line,) = [m for m in caplog.messages if m.startswith("model.path=")]
    assert "running transformers' own module instead" in line and "\n" not in line
    assert folder_spec(tmp_path, "here", with_weights=False).implementation == "transformers"
    with pytest.raises(ConfigError, match=r"use model\.implementation=auto or transformers, whose module computes it"):
        folder_spec(tmp_path, "here", with_weights=False, implementation="native")


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("Nanbeige/Llama with dynamic", {}, "RoPE of type dynamic depends on the longest row"),
        ("Nemotron-3-Nano-30B-A3B", {}, "layers of linear_attention, moe are not supported"),
        ("Llama-3.2-1B", {"hidden_act": "gelu", "quantization_config": {"quant_method": "fp8"}}, "packed weights are"),
        ("Llama-3.2-1B", {"hidden_act": "no_such_activation"}, "transformers cannot make it"),
    ],
)
def test_where_the_module_cannot_run_it_either_both_reasons_are_given(
    name: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **more}))
    for implementation in ("auto", "native"):
        with pytest.raises(
            ConfigError, match=f"model.implementation=transformers cannot run it either .*{why}"
        ) as caught:
            folder_spec(tmp_path, "here", with_weights=False, implementation=implementation)
        assert "support" in str(caught.value).partition("cannot run it")[0]


@pytest.mark.parametrize(
    ("name", "more", "ignored"),
    [
        ("Llama-3.2-1B", {"logit_scale": 0.5}, "logit_scale=0.5"),  # transformers would compute another model
        ("Llama-3.2-1B", {"hidden_act": "gelu", "logit_scale": 0.5}, "logit_scale=0.5"),
        ("Llama-3.2-1B", {"hidden_act": "gelu", "attention_multiplier": 0.5}, "attention_multiplier=0.5"),
        ("Llama-3.2-1B", {"hidden_act": "gelu", "is_causal": False}, "is_causal=False"),
        ("Mistral-7B-v0.1", {"layer_types": ["full_attention"] * 32}, "layer_types: layers of full_attention"),
        ("Mistral-7B-v0.1", {"layer_types": ["linear_attention"] * 32, "hidden_act": "gelu"}, "of linear_attention"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mrope": 2}}, "rope_parameters.mrope=2"),
        (
            "Qwen3-8B, YaRN as its card says",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "rope_parameters.llama_4_scaling_beta=0.1",
        ),
        (
            "Olmo-3-7B",
            {
                "rope_parameters": {
                    kind: {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False}
                    for kind in ("full_attention", "sliding_attention")
                },
                "rope_scaling": None,
            },
            "truncate=false of a kind of layers",
        ),
    ],
)
def test_a_field_that_transformers_ignores_is_no_case_for_its_module(
    name: str, more: dict[str, Any], ignored: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **more}))
    with pytest.raises(ConfigError) as caught:
        folder_spec(tmp_path, "here", with_weights=False)
    assert "model.implementation" not in str(caught.value) and ignored in str(caught.value)


def logprobs_of_both(raw: dict[str, Any], folder: Path) -> list[torch.Tensor]:
    """Ours at `fast` and transformers' of one random model, float64 [60, V]."""
    module = saved_random(read_by_transformers(raw, folder), folder)
    (folder / "config.json").write_text(json.dumps(raw))  # as published, not as transformers saved it
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    model = load_model(without_tokenizer(folder), create_ops("fast", torch.float32, torch.device("cpu")), 64)
    ids = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(1))
    ours = PagedRunner(model, block_size=7).step({"s": ids.tolist()})["s"]
    with torch.inference_mode():
        theirs = module(ids[None]).logits[0]
    return [torch.log_softmax(logits.double(), -1) for logits in (ours, theirs)]


@pytest.mark.parametrize(
    "raw",
    [pytest.param(tiny(PUBLISHED[name]), id=name) for name in ACCEPTED]
    + [pytest.param(tiny(PUBLISHED[name]) | more, id=f"{name}-altered") for name, more in ALTERED.items()]
    + [pytest.param(COHERE2, id="command-r7b")],
)
def test_a_tiny_model_of_the_file_has_transformers_logits(raw: dict[str, Any], tmp_path: Path) -> None:
    spec_from_json(raw)  # natively
    ours, theirs = logprobs_of_both(raw, tmp_path)
    error, spread = float((ours - theirs).square().mean().sqrt()), float(theirs.std())
    assert error < 3e-4 * spread


def test_every_native_family_has_a_published_file() -> None:
    collected = {family.model_type for name in ACCEPTED if (family := family_of(PUBLISHED[name])) is not None}
    assert native_families() == collected | NOT_COLLECTED and not collected & NOT_COLLECTED


@pytest.mark.parametrize("model_type", sorted(native_families()))
def test_every_older_spelling_that_a_class_takes_is_read(model_type: str) -> None:
    """Published files have fields that transformers' class declares no more, but takes out of its other arguments."""
    (family,) = (family for family in MODEL_REGISTRY.values() if family.model_type == model_type)
    source = inspect.getsource(CONFIG_MAPPING[model_type])
    taken = {*re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', source)}
    known = family.reads | READ | WITHOUT_EFFECT
    assert taken <= known, f"not read: {sorted(taken - known)}"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma-2-2b", {"hidden_act": "relu"}, "hidden_act='relu' contradicts hidden_activation='gelu_pytorch_tanh'"),
        ("starcoder2-3b", {"norm_type": "rms_norm"}, "norm_type='rms_norm': only 'layer_norm' is supported"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, "first_k_dense_replace=2: .*; set mlp_layer_types"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": "x"}, "first_k_dense_replace='x'"),
        ("GLM-4.7-Flash", {"scoring_func": "softmax"}, "scoring_func='softmax': only 'sigmoid' is supported"),
        ("Apertus-8B-Instruct-2509", {"qk_norm": False}, "qk_norm=False: only True is supported"),
        ("Apertus-8B-Instruct-2509", {"post_norm": True}, "post_norm=True: only False is supported"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token=2 contradicts num_experts_per_tok=4"),
        ("gpt-oss-20b", {"initial_context_length": 8192}, "initial_context_length=8192: the model has 4096"),
        ("gemma-3-1b-it", {"rope_local_base_freq": "x"}, "rope_local_base_freq='x': must be a number"),
        ("gemma-3-1b-it", {"sliding_window_pattern": 0}, "not a valid configuration"),
        ("ERNIE-4.5-0.3B-PT", {"compression_ratio": 2.0}, "compression_ratio=2.0: only 1 is supported"),
        ("Llama-3.2-1B", {"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000.0: no model of this class"),
        ("Llama-3.2-1B", {"sliding_window_pattern": 6}, "sliding_window_pattern=6: no model of this class"),
        (
            "Qwen3.5-0.8B (wrapper)",
            {"text_config": {"model_type": "mistral"}},
            "text_config.model_type='mistral': must be",
        ),
        ("NVIDIA-Nemotron-Nano-9B-v2", {"hybrid_override_pattern": "x"}, "look at hybrid_override_pattern='x'"),
        ("Qwen3-Next-80B-A3B", {"linear_conv_kernel_dim": 1}, r"taps=1: must be .*linear_conv_kernel_dim=1"),
        ("Qwen2.5-7B-Instruct", {"hidden_size": 3}, r"head_dim=0: must be .*\(hidden_size=3, num_attention_heads=28\)"),
    ],
)
def test_a_field_that_contradicts_the_model_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        spec_from_json({**PUBLISHED[name], **changes})
    assert len(caught.value.problems) == 1 and "remove" not in str(caught.value)
