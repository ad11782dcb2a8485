"""GGUF files of tiny models, laid out as llama.cpp's converters lay out each architecture (`conversion/` there).

Names of tensors are the `gguf` library's own table's, not the reader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from torch import Tensor
from transformers import PreTrainedModel

Q = gguf.GGMLQuantizationType
PERMUTED = {"llama", "mistral3", "smollm3", "granite", "granitemoe"}  # the converters that derive from Llama's
# What a configuration calls something -> the key below the architecture's name.
KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
WITH_WINDOW = {"gemma2", "gemma3", "olmo2", "exaone4", "cohere2", "phi3", "gpt-oss"}  # whose converters write one
WITH_PATTERN = {"olmo2", "exaone4"}


def write_gguf(path: Path, model: PreTrainedModel, arch: str, kind: Q, more: dict[str, Any]) -> None:
    """Writes the file: matrices as `kind`, vectors as float32. more: further metadata of the architecture."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in {**_metadata(model.config, arch), **more}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{arch}.{key}", value)
    for name, tensor in _tensors(model, arch):
        stored = kind if tensor.ndim > 1 and not name.startswith("rope_") else Q.F32
        writer.add_tensor(name, quantize(tensor.float().contiguous().numpy(), stored), raw_dtype=stored)
    write_file(writer)


def write_file(writer: gguf.GGUFWriter) -> None:
    """Writes all that the writer was given, and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    values = config.to_dict()
    metadata = {key: values[name] for name, key in KEYS.items() if values.get(name) is not None}
    experts = values.get("num_local_experts") or values.get("num_experts")
    if experts:
        metadata["expert_count"] = experts
    if values.get("sliding_window") and arch in WITH_WINDOW and (arch != "olmo2" or config.model_type == "olmo3"):
        metadata["attention.sliding_window"] = values["sliding_window"]
        if arch in WITH_PATTERN:
            metadata["attention.sliding_window_pattern"] = [t == "sliding_attention" for t in values["layer_types"]]
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    metadata["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        written = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        metadata |= {f"rope.scaling.yarn_{key}": float(rope[name]) for name, key in written.items() if name in rope}
    head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    if not arch.startswith("gemma"):
        metadata["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return metadata


def _tensors(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        for part, piece in _pieces(name, tensor.detach(), config, arch):
            new = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert new is not None, f"{arch} has no name for {part}"
            yield new, piece
    for length in ("long", "short"):
        if factors := config.rope_parameters.get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", torch.tensor(factors)


def _pieces(name: str, tensor: Tensor, config: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    """What a converter makes of one tensor: names that the library's table knows, with their numbers."""
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        yield name, tensor.float() + 1
    elif arch in PERMUTED and ".q_proj." in name:
        yield name, _permuted(tensor, config.num_attention_heads)
    elif arch in PERMUTED and ".k_proj." in name:
        yield name, _permuted(tensor, config.num_key_value_heads)
    elif "query_key_value" in name:  # of each head q, k and v -> all of q, all of k, all of v
        by_head = tensor.unflatten(0, (config.num_attention_heads, 3, -1))
        yield name, torch.cat([by_head[:, i].flatten(0, 1) for i in range(3)])
    elif "conv.conv" in name:
        yield name, tensor.squeeze(1)
    elif name.endswith(".expert_bias"):
        yield f"{name}.bias", tensor
    elif "block_sparse_moe.router." in name:
        yield name.replace("router.", "router.layer."), tensor
    elif name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif "experts" in name and "shared" not in name:
        yield from _experts(name, tensor, arch)
    else:
        yield name, tensor


def _experts(name: str, tensor: Tensor, arch: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors [E, ...] of all experts, as transformers has them in memory."""
    name = name.replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
    name, bias = (name.removesuffix("_bias"), ".bias") if name.endswith("_bias") else (name, ".weight")
    if arch == "gpt-oss" and bias == ".weight":  # inputs before outputs
        tensor = tensor.transpose(1, 2)
    if name.endswith("down_proj"):
        yield name + bias, tensor
        return
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if arch == "gpt-oss" else tensor.chunk(2, 1)
    base = name.removesuffix("gate_up_proj")
    yield from ((f"{base}gate_proj{bias}", gate), (f"{base}up_proj{bias}", up))


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows of heads: pairs (i, i + D / 2) become side by side."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
