"""LFM2: short convolutions between gates in most layers, attention with normed heads in the others."""

from __future__ import annotations

from typing import Any

from evalengine.kernels.recurrent_variant import ShortConv
from evalengine.models.describe import by_layer, describe
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
    return describe(family, config, qk_norm=True, eps="norm_eps", blocks=blocks, intermediate_size=width)


def _intermediate_size(config: Any) -> int:
    """The feed-forward's width, as transformers' `Lfm2MLP` makes it of the configuration's."""
    size = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        size = 2 * size // 3
        if config.block_ffn_dim_multiplier is not None:
            multiple = config.block_multiple_of
            size = -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
    return size


LFM2 = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    _spec,
    _READS,
    WeightNames(
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
        },
    ),
)
