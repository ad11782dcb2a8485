"""LFM2, dense or with experts: short convolutions between gates in most layers, attention with normed heads in some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.kernels.recurrent_variant import ShortConv
from evalengine.models.describe import by_layer, describe
from evalengine.models.families.mixtral import EXPERT_PARTS
from evalengine.models.file_values import is_integer, shown
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

_READS = frozenset(
    {
        *("layer_types", "full_attn_idxs", "conv_L_cache", "conv_bias", "norm_eps", "block_auto_adjust_ff_dim"),
        *("block_ffn_dim_multiplier", "block_multiple_of", "tie_embedding", "block_ff_dim"),
    }
)


def _spec(family: Family, config: Any) -> ModelSpec:
    conv = Block(recurrence=ShortConv(config.hidden_size, config.conv_L_cache, config.conv_bias))
    blocks = by_layer(config, lambda kind: conv if kind == "conv" else Block(), "conv")
    width = _intermediate_size(config)
    return describe(
        family, config, biases=(False, False), qk_norm=True, eps="norm_eps", blocks=blocks, intermediate_size=width
    )


def _intermediate_size(config: Any) -> int:
    """The feed-forward's width, as transformers' `Lfm2MLP` makes it of the configuration's."""
    size = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        size = 2 * size // 3
        if config.block_ffn_dim_multiplier is not None:
            multiple = config.block_multiple_of
            size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
    return size


def _moe(family: Family, config: Any) -> ModelSpec:
    """Layers from `num_dense_layers` on have experts, and every feed-forward has the configured width."""
    if not is_integer(config.num_dense_layers, 0, 1024):
        raise ConfigError(f"num_dense_layers={shown(config.num_dense_layers)}: must be a number of layers")
    router = Router(
        config.num_experts,
        config.num_experts_per_tok,
        "sigmoid",
        choice_bias=config.use_expert_bias,
        normed=config.norm_topk_prob,
        sum_offset=1e-6,
        scaling=float(config.routed_scaling_factor),
        rounded_scores=True,
    )
    mixture = Mixture(router, config.moe_intermediate_size)
    conv = Block(recurrence=ShortConv(config.hidden_size, config.conv_L_cache, config.conv_bias))
    blocks = by_layer(config, lambda kind: conv if kind == "conv" else Block(), "conv")
    dense = config.num_dense_layers
    layers = range(config.num_hidden_layers)
    own = tuple(replace(blocks[i % len(blocks)], mixture=mixture if i >= dense else None) for i in layers)
    return describe(family, config, biases=(False, False), qk_norm=True, eps="norm_eps", blocks=own)


_NAMES = WeightNames(
    prefixes={"model.embedding_norm.": "model.norm."},
    parts={
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "conv.conv": "mixer.conv",
        "conv.in_proj": "mixer.in_proj",
        "conv.out_proj": "mixer.out_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "self_attn.out_proj": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.gate": "mlp.gate",
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
        "feed_forward.experts.gate_up_proj": "mlp.experts.gate_up_proj",
        "feed_forward.experts.down_proj": "mlp.experts.down_proj",
    },
    expert_parts=EXPERT_PARTS,
)


def _gguf(metadata: Metadata, config: Config) -> None:
    """A layer without KV heads is a convolution; a feed-forward's width is that which the file has."""
    counts = metadata.value("attention.head_count_kv")
    if not isinstance(counts, list):
        raise ConfigError("attention.head_count_kv: must have a number for each layer")
    config["layer_types"] = ["full_attention" if count else "conv" for count in counts]
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["conv_L_cache"] = metadata.integer("shortconv.l_cache")
    config["conv_bias"] = metadata.biased("shortconv.conv")


def _gguf_dense(metadata: Metadata, config: Config) -> None:
    _gguf(metadata, config)
    config["block_auto_adjust_ff_dim"] = False


def _gguf_moe(metadata: Metadata, config: Config) -> None:
    _gguf(metadata, config)
    config["use_expert_bias"] = metadata.biased("exp_probs_b")
    if metadata.integer("expert_gating_func", 2) != 2:
        raise ConfigError("expert_gating_func: the experts of an LFM2 are chosen by sigmoids (2)")
    named(
        expert_count="num_experts",
        expert_used_count="num_experts_per_tok",
        expert_feed_forward_length="moe_intermediate_size",
        leading_dense_block_count="num_dense_layers",
    )(metadata, config)


_OUTPUT_NORM = {"token_embd_norm": "model.norm"}
LFM2 = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    _spec,
    _READS,
    _NAMES,
    GGUFForm("lfm2", _gguf_dense, names=_OUTPUT_NORM),
    implied={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
)
LFM2_MOE = Family(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    _moe,
    frozenset(
        {
            *("layer_types", "conv_L_cache", "conv_bias", "norm_eps", "num_dense_layers", "num_experts"),
            *("num_experts_per_tok", "moe_intermediate_size", "use_expert_bias", "norm_topk_prob"),
            *("routed_scaling_factor", "tie_embedding"),
        }
    ),
    _NAMES,
    GGUFForm("lfm2moe", _gguf_moe, names=_OUTPUT_NORM),
)
