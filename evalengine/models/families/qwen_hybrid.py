"""Qwen3.5 and Qwen3-Next: most layers a gated delta rule, the others attention with an output gate; experts or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.layers.variants import Norm
from evalengine.models.describe import by_layer, describe, gated_delta_of
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import OF_TEXT_PART, WeightNames

_READS = frozenset(
    {
        *("layer_types", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "partial_rotary_factor"),
    }
)
_MIXTURE = frozenset({"moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok"})
_IMPLIED = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}
_NAMES = WeightNames(
    parts={
        **{f"linear_attn.in_proj_{part}": f"mixer.in_proj_{part}" for part in ("qkvz", "ba", "qkv", "z", "b", "a")},
        **{f"linear_attn.{part}": f"mixer.{part}" for part in ("A_log", "dt_bias", "norm", "out_proj")},
        "linear_attn.conv1d": "mixer.conv",
    },
    bare=(".A_log", ".dt_bias"),
    gated_q=True,
)


def _spec(family: Family, config: Any, mixture: Mixture | None = None) -> ModelSpec:
    rule = gated_delta_of(config)
    attention, recurrent = Block(output_gate=True, mixture=mixture), Block(recurrence=rule, mixture=mixture)
    blocks = by_layer(config, lambda kind: recurrent if kind == "linear_attention" else attention, "linear_attention")
    return describe(
        family,
        config,
        qk_norm=True,
        blocks=blocks,
        norm=Norm(eps=0.0, offset=1.0, cast_first=False),
        intermediate_size=None if mixture is None else mixture.intermediate_size,
    )


def _moe(family: Family, config: Any) -> ModelSpec:
    """Every layer has experts, whose weights always add up to 1, and a shared one with a gate."""
    return _spec(family, config, _mixture(config, normed=True))


def _next(family: Family, config: Any) -> ModelSpec:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ConfigError("mlp_only_layers, decoder_sparse_step: layers without experts are not supported here")
    return _spec(family, config, _mixture(config, normed=config.norm_topk_prob))


def _mixture(config: Any, *, normed: bool) -> Mixture:
    router = Router(config.num_experts, config.num_experts_per_tok, normed=normed)
    shared = config.shared_expert_intermediate_size
    return Mixture(router, config.moe_intermediate_size, shared_size=shared, shared_gate=True)


QWEN3_5 = Family("Qwen3_5ForCausalLM", "qwen3_5_text", _spec, _READS, _NAMES, implied=_IMPLIED)
QWEN3_5_MOE = Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _moe, _READS | _MIXTURE, _NAMES, implied=_IMPLIED)
_OF_IMAGES = replace(_NAMES, prefixes=OF_TEXT_PART.prefixes)
QWEN3_5_IMAGES = Family("Qwen3_5ForConditionalGeneration", "qwen3_5", weights=_OF_IMAGES, wraps="qwen3_5_text")
QWEN3_5_MOE_IMAGES = Family(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", weights=_OF_IMAGES, wraps="qwen3_5_moe_text"
)
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    _next,
    _READS | _MIXTURE | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
    _NAMES,
    implied=_IMPLIED,
)
