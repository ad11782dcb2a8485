"""Falcon-H1: attention and Mamba-2 in parallel in every layer, and factors of nearly every product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.models.describe import describe, mamba2_of
from evalengine.models.file_values import is_number, shown
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec, Multipliers
from evalengine.models.weight_names import MAMBA, MAMBA_BARE, WeightNames

_READS = frozenset(
    {
        *("embedding_multiplier", "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "ssm_multipliers"),
        *("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
        *("mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
        *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_norm_before_gate"),
        *("mamba_rms_norm", "time_step_limit", "projectors_bias", "mlp_bias", "layer_types", "layers_block_type"),
    }
)


def _spec(family: Family, config: Any) -> ModelSpec:
    if config.projectors_bias != config.mamba_proj_bias:
        raise ConfigError(
            "projectors_bias, mamba_proj_bias: supported are biases of both of Mamba-2's projections or of neither"
        )
    after = config.mamba_norm_before_gate
    scan = replace(
        mamba2_of(config),
        gated=("after norm" if after else "before norm") if config.mamba_rms_norm else "alone",
        norm_rounded_once=True,
    )
    gate, feed_forward_out = _numbers(config, "mlp_multipliers", 2)
    multipliers = Multipliers(
        attention_in=config.attention_in_multiplier,
        key=config.key_multiplier,
        attention_out=config.attention_out_multiplier,
        recurrence_in=config.ssm_in_multiplier,
        projected=_numbers(config, "ssm_multipliers", 5),
        recurrence_out=config.ssm_out_multiplier,
        gate=gate,
        feed_forward_out=feed_forward_out,
    )
    block = Block(recurrence=scan, beside_attention=True, mlp_bias=config.mlp_bias, multipliers=multipliers)
    return describe(
        family,
        config,
        blocks=(block,),
        embedding_scale=config.embedding_multiplier,
        embedding_scale_rounded=False,
        logits_scale=config.lm_head_multiplier,
    )


def _numbers(config: Any, name: str, count: int) -> tuple[float, ...]:
    """A configuration's list of so many factors. Raises ConfigError for anything else."""
    values = getattr(config, name)
    if not isinstance(values, list | tuple) or len(values) != count or not all(is_number(v, 1e-9, 1e9) for v in values):
        raise ConfigError(f"{name}={shown(values)}: must be {count} positive numbers")
    return tuple(float(value) for value in values)


FALCON_H1 = Family(
    "FalconH1ForCausalLM",
    "falcon_h1",
    _spec,
    _READS,
    WeightNames(
        prefixes={"model.final_layernorm.": "model.norm."},
        parts={
            "pre_ff_layernorm": "post_attention_layernorm",
            **{f"feed_forward.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
            **MAMBA,
        },
        buffers=(".mup_vector",),
        bare=MAMBA_BARE,
    ),
    implied={"mamba_use_mlp": (True,)},
)
