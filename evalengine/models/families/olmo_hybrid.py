"""OLMo-Hybrid: a gated delta rule between Llama's norms in most layers; the others are OLMo 3's, RoPE or none."""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import by_layer, describe, gated_delta_of, rope_of
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

_READS = frozenset(
    {
        *("layer_types", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "no_rope"),
        *("linear_value_head_dim", "linear_conv_kernel_dim", "linear_allow_neg_eigval"),
    }
)


def _spec(family: Family, config: Any) -> ModelSpec:
    beta_scale = 2.0 if config.linear_allow_neg_eigval else 1.0
    eps = 1e-5  # transformers' `OlmoHybridGatedDeltaNet.o_norm`
    rule = gated_delta_of(config, beta_scale=beta_scale, norm_eps=eps)
    attention = Block(norm_before=False, norm_after=True, qk_norm_of="vector")
    recurrent = Block(recurrence=rule, qk_norm_of="vector")
    turned = (config.rope_parameters or {}).get("rope_theta") is not None
    return describe(
        family,
        config,
        qk_norm=True,
        rope=rope_of(config, wide=True) if turned else NO_ROPE,
        blocks=by_layer(
            config, lambda kind: recurrent if kind == "linear_attention" else attention, "linear_attention"
        ),
        norm=Norm(eps=0.0, cast_first=False),
    )


OLMO_HYBRID = Family(
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    _spec,
    _READS,
    WeightNames(
        parts={
            "attention_layer_norm": "input_layernorm",
            "feedforward_layer_norm": "post_attention_layernorm",
            "post_feedforward_layernorm": "mlp_output_norm",
            **{f"linear_attn.{name}_proj": f"mixer.in_proj_{name}" for name in "qkvab"},
            "linear_attn.g_proj": "mixer.in_proj_z",
            "linear_attn.conv1d": "mixer.conv",
            **{f"linear_attn.{name}_conv1d": f"mixer.conv_{name}" for name in "qkv"},
            "linear_attn.A_log": "mixer.A_log",
            "linear_attn.dt_bias": "mixer.dt_bias",
            "linear_attn.o_norm": "mixer.norm",
            "linear_attn.o_proj": "mixer.out_proj",
        },
        bare=(".A_log", ".dt_bias"),
    ),
)
