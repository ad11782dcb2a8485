"""A GGUF file of every family whose files are read is the model of its folder: the same spec, weights and logits.

The files are written as llama.cpp's converters write them, with the `gguf` library's names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from evalengine.engine.load.gguf import GGUFFile
from evalengine.engine.load.loader import Checkpoint, file_stamp, load_model
from evalengine.errors import ConfigError
from evalengine.layers import create_ops
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.registry import MODEL_REGISTRY
from tests.parity.families import (
    CAPS,
    EXPERTS,
    FACTORS,
    LONG,
    MINISTRAL,
    NEAR,
    PLAIN,
    PYTHIA,
    SHORT,
    UNTRUNCATED,
    WINDOW,
    YARN,
    random_model,
)
from tests.parity.gguf_files import Q, write_gguf
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer

LENGTH = {"intermediate_size": 160}  # rows of blocks of 32, which a Q8_0 has
TIED = {"tie_word_embeddings": True}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
TEMPERATURE = {
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": 0.1,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, **TIED}
BY_LAYER = {"full_attention": {**YARN, "factor": 8.0}, "sliding_attention": PLAIN}
# LongRoPE's lists of one number for each pair of the 24 dimensions that turn.
LONG_ROWS = {"hidden_size": 192, "rope_parameters": LONG, "original_max_position_embeddings": 128}
OF_LONG = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.1338934}

# An LFM2 of 160 features has 108 after its adjustment by 2/3 to a multiple of 4.
LFM2 = {
    "attention.head_count_kv": [0, 2, 0, 0],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 108,
    "shortconv.l_cache": 3,
}

# architecture, model_type, its configuration beside SIZES, metadata that only this architecture has
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {"attention_bias": True}, {}),
    "llama-yarn": ("llama", "llama", {"rope_parameters": {**NEAR, "beta_fast": 2.0, "beta_slow": 0.25}}, {}),
    "mistral-window": ("llama", "mistral", {"sliding_window": WINDOW}, {"attention.sliding_window": WINDOW}),
    "ministral3": ("mistral3", "ministral3", {"rope_parameters": MINISTRAL}, TEMPERATURE),
    "gemma2": ("gemma2", "gemma2", {**GEMMA, **CAPS, "query_pre_attn_scalar": 32}, {}),
    "gemma3": ("gemma3", "gemma3_text", {**GEMMA, "num_hidden_layers": 7}, {"rope.freq_base_swa": 10000.0}),
    "phi3": ("phi3", "phi3", {"sliding_window": WINDOW}, {}),
    "phi3-partial": ("phi3", "phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}, **TIED}, {}),
    "phi3-long": ("phi3", "phi3", LONG_ROWS, {"rope.scaling.type": "longrope", **OF_LONG}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": ("olmo2", "olmo3", {"sliding_window": WINDOW, "rope_parameters": BY_LAYER}, {}),
    "smollm3": ("smollm3", "smollm3", {**TIED, "mlp_bias": True, "rope_parameters": NEAR}, {}),
    "granite": ("granite", "granite", {**FACTORS, "head_dim": None, **TIED}, {}),
    "exaone4": ("exaone4", "exaone4", {"sliding_window": WINDOW}, {}),
    "exaone4-full": ("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
    "glm4": ("glm4", "glm4", {"attention_bias": True, "rope_parameters": HALF}, {}),
    "hunyuan": ("hunyuan-dense", "hunyuan_v1_dense", {"rope_parameters": {**PLAIN, "rope_theta": 11158840.0}}, {}),
    "ernie": ("ernie4_5", "ernie4_5", {"use_bias": False}, {}),
    "cohere2": ("cohere2", "cohere2", {"sliding_window": WINDOW, "logit_scale": 0.25, **TIED}, {}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None, "use_bias": True}, {}),
    "pythia": ("gptneox", "gpt_neox", {**PYTHIA, "head_dim": None}, {}),
    "seed-oss": ("seed_oss", "seed_oss", {"mlp_bias": True}, {}),
    "gemma": ("gemma", "gemma", TIED, {}),
    "command-r": (
        "command-r",
        "cohere",
        {"head_dim": None, "logit_scale": 0.25, **TIED},
        {"rope.scaling.type": "none"},
    ),
    "stablelm": ("stablelm", "stablelm", {"head_dim": None, "use_qkv_bias": True}, {}),
    "stablelm-parallel": ("stablelm", "stablelm", {"head_dim": None, "use_parallel_residual": True}, {}),
    "lfm2": ("lfm2", "lfm2", {**SHORT, "layer_types": ["conv", "full_attention", "conv", "conv"]}, LFM2),
    "lfm2-moe": (
        "lfm2moe",
        "lfm2_moe",
        {**EXPERTS, **TIED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "conv"]},
        {**LFM2, "feed_forward_length": 160, "leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": {**NEAR, "attention_factor": 1.25}}, {}),
    "qwen3": ("qwen3", "qwen3", {"rope_parameters": NEAR}, {"rope.scaling.yarn_ext_factor": 1.0}),
    "qwen2-moe": ("qwen2moe", "qwen2_moe", {"head_dim": None, **EXPERTS, "shared_expert_intermediate_size": 64}, {}),
    "qwen3-moe": ("qwen3moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, {}),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 6}, {}),
    "olmoe": ("olmoe", "olmoe", {"head_dim": None, "num_experts": 6, "num_experts_per_tok": 3}, {}),
    "granite-moe": (
        "granitemoe",
        "granitemoe",
        {"head_dim": None, **FACTORS, "num_local_experts": 6, "num_experts_per_tok": 3, **TIED},
        {},
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {"sliding_window": WINDOW, "num_local_experts": 6, "rope_parameters": UNTRUNCATED},
        {"expert_feed_forward_length": 160},
    ),
}


def both(name: str, folder: Path, kind: Q) -> tuple[Checkpoint, Checkpoint]:
    """A case's folder and its GGUF file; of a quantised one, the folder has the file's numbers."""
    arch, model_type, config, more = CASES[name]
    inner = {"moe_intermediate_size": 64} if "moe_intermediate_size" in config else {}
    model = random_model(model_type, {**LENGTH, **config, **inner}, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_stored(parameter, kind))
    if kind == Q.BF16:
        model = model.bfloat16()
    model.save_pretrained(folder)
    path = folder / "m.gguf"
    write_gguf(path, model, arch, kind, more)
    file = GGUFFile(path)
    spec = dataclasses.replace(file.spec(), bos_token_id=1, eos_token_ids=(2,))
    of_file = Checkpoint(path, "gguf", spec, None, str(path), None, file, file_stamp(path, "gguf"))
    return without_tokenizer(folder), of_file


def _stored(parameter: Tensor, kind: Q) -> Tensor:
    """The numbers that a file can hold of a parameter. A vector's have a bfloat16's bits: 1 is added to Gemma's norms,
    and taken from them again, and of other numbers that would round some."""
    if parameter.ndim == 1:
        return parameter.bfloat16().float()
    if kind != Q.Q8_0:
        return parameter
    rows = parameter.transpose(1, 2) if parameter.ndim == 3 and parameter.shape[-1] % 32 else parameter
    return torch.from_numpy(dequantize(quantize(rows.detach().contiguous().numpy(), kind), kind)).view_as(parameter)


def logits(model: DecoderForCausalLM) -> Tensor:
    return PagedRunner(model).step({"s": [3 + (7 * i + i * i) % 200 for i in range(2 * WINDOW + 3)]})["s"]


def same_models(folder: Checkpoint, file: Checkpoint) -> None:
    # A file of blocks is float32; what ends a generation is in a folder's generation_config.json.
    plain = dataclasses.replace(file.spec, eos_token_ids=folder.spec.eos_token_ids, processors=folder.spec.processors)
    assert plain == folder.spec
    models = [load_model(c, create_ops("exact", torch.float32, torch.device("cpu")), 256) for c in (folder, file)]
    for (name, ours), (_, theirs) in zip(*(m.named_parameters() for m in models), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(*map(logits, models))


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_its_folders_model(name: str, tmp_path: Path) -> None:
    same_models(*both(name, tmp_path, Q.F32))


@pytest.mark.parametrize("kind", [Q.BF16, Q.Q8_0])
@pytest.mark.parametrize("name", ["gemma3", "phi3-partial", "granite", "pythia", "qwen3-moe"])
def test_stored_types(name: str, kind: Q, tmp_path: Path) -> None:
    same_models(*both(name, tmp_path, kind))


def test_every_family_with_files_has_a_case() -> None:
    assert {f.model_type for f in MODEL_REGISTRY.values() if f.gguf} == {
        model_type for _, model_type, *_ in CASES.values()
    }


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "no layer would have positions"),
        ("qwen3", {"attention.sliding_window": 9}, "a sliding window is not supported"),
        ("cohere2", {"rope.freq_base_swa": 5e5}, "layers with different RoPE settings"),
        ("gemma2", {"attention.sliding_window_pattern": [True] * 3}, "layer_types"),
        ("qwen2", {"rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor=0.5 is not supported"),
        ("olmo2", {"rope.scaling.yarn_attn_factor": 1.5}, "rope.scaling.yarn_attn_factor=1.5 is not supported"),
        ("qwen3-moe", {"expert_weights_scale": 2.5}, "expert_weights_scale=2.5 is not supported"),
        ("granite-moe", {"expert_shared_feed_forward_length": 64}, "expert_shared_feed_forward_length=64"),
        ("pythia", {"rope.dimension_count": 9}, "rotary_dim=9: must be even"),
        ("pythia", {"attention.head_count": 2**31}, "head_dim=0: must be an integer from 1"),
        ("stablelm", {"embedding_length": 3}, "head_dim=0: must be an integer from 1"),
        ("qwen3", {"attention.head_count_kv": [2, 2, 1, 2]}, "layers with unlike numbers of heads"),
        ("lfm2", {"attention.head_count_kv": 2}, "attention.head_count_kv: must have a number for each layer"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arch, model_type, config, more = CASES[name]
    model = random_model(model_type, {**LENGTH, **config}, tmp_path)
    write_gguf(tmp_path / "m.gguf", model, arch, Q.F32, {**more, **metadata})
    with pytest.raises(ConfigError, match=message):
        GGUFFile(tmp_path / "m.gguf").spec()


def test_only_layers_that_see_all_keys_have_a_stretched_rope(tmp_path: Path) -> None:
    """So it is in Gemma 3 of 4B and more."""
    arch, model_type, config, more = CASES["gemma3"]
    model = random_model(model_type, {**LENGTH, **config}, tmp_path)
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    write_gguf(tmp_path / "m.gguf", model, arch, Q.F32, {**more, **scaled})
    spec = GGUFFile(tmp_path / "m.gguf").spec()
    assert [spec.rope_of(spec.block(i)).type for i in range(7)] == ["default"] * 5 + ["linear", "default"]
