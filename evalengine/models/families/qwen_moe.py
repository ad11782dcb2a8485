"""Qwen2 and Qwen3 with experts in some layers or in all; Qwen2's also have a shared expert with a gate."""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import WINDOW, describe, window, windows, with_experts
from evalengine.models.file_values import is_integer, shown
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec

_READS = frozenset(
    {
        *("decoder_sparse_step", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("norm_topk_prob", "mlp_only_layers", "use_sliding_window", "sliding_window", "max_window_layers"),
    }
)


def _with_experts(config: Any, blocks: tuple[Block, ...], mixture: Mixture) -> tuple[Block, ...]:
    """The blocks, with experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    if not is_integer(step, 1, 1024) or not (isinstance(dense, list) and all(is_integer(layer) for layer in dense)):
        raise ConfigError(f"decoder_sparse_step={shown(step)}, mlp_only_layers={shown(dense)}: must name layers")
    return with_experts(config, blocks, mixture, lambda layer: layer not in dense and (layer + 1) % step == 0)


def _router(config: Any) -> Router:
    return Router(config.num_experts, config.num_experts_per_tok, normed=config.norm_topk_prob)


def _qwen2(family: Family, config: Any) -> ModelSpec:
    shared = config.shared_expert_intermediate_size
    mixture = Mixture(_router(config), config.moe_intermediate_size, shared_size=shared, shared_gate=True)
    blocks = _with_experts(config, windows(config, Block()), mixture)
    return describe(family, config, biases=(getattr(config, "qkv_bias", True), False), blocks=blocks)


def _qwen3(family: Family, config: Any) -> ModelSpec:
    block = Block(window=window(config)) if config.use_sliding_window else Block()
    blocks = _with_experts(config, (block,), Mixture(_router(config), config.moe_intermediate_size))
    return describe(family, config, qk_norm=True, blocks=blocks)


_experts = named(
    expert_count="num_experts",
    expert_used_count="num_experts_per_tok",
    expert_feed_forward_length="moe_intermediate_size",
    expert_shared_feed_forward_length="shared_expert_intermediate_size",
)


def _gguf3(metadata: Metadata, config: Config) -> None:
    _experts(metadata, config)
    config["norm_topk_prob"] = True  # no metadata: llama.cpp's graph has it


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _qwen2,
    _READS | WINDOW | {"shared_expert_intermediate_size", "qkv_bias"},
    gguf=GGUFForm("qwen2moe", _experts),
)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3, _READS, gguf=GGUFForm("qwen3moe", _gguf3))
