"""Granite 4: Mamba-2 in most layers, or in none; attention without RoPE in the others; one feed-forward, in some sizes
beside experts.
"""

from __future__ import annotations

from typing import Any

from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import by_layer, describe, mamba2_of, rope_of
from evalengine.models.families.granite import EXPERTS
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import MAMBA, MAMBA_BARE, WeightNames

_READS = frozenset(
    {
        *("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier", "layer_types"),
        *("layers_block_type", "position_embedding_type", "shared_intermediate_size", "num_local_experts"),
        *("num_experts_per_tok", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        *("mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "mamba_chunk_size", "time_step_limit", "time_step_min"),
    }
)


def _spec(family: Family, config: Any) -> ModelSpec:
    mixture = None
    if experts := config.num_local_experts:
        router = Router(experts, config.num_experts_per_tok, scores="logit")
        mixture = Mixture(router, config.intermediate_size, shared_size=config.shared_intermediate_size)
    rope = rope_of(config) if config.position_embedding_type == "rope" else NO_ROPE
    scan = mamba2_of(config)

    def block(kind: str) -> Block:
        return Block(
            rope=rope,
            scale=config.attention_multiplier,
            residual_scale=config.residual_multiplier,
            recurrence=scan if kind == "linear_attention" else None,
            mixture=mixture,
        )

    return describe(
        family,
        config,
        rope=rope,
        blocks=by_layer(config, block, "linear_attention"),
        embedding_scale=config.embedding_multiplier,
        logits_scale=1.0 / config.logits_scaling,
        intermediate_size=config.shared_intermediate_size,
    )


GRANITE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    _spec,
    _READS,
    WeightNames(
        parts={
            **MAMBA,
            **EXPERTS,
            "shared_mlp.input_linear": "mlp.gate_up_proj",
            "shared_mlp.output_linear": "mlp.down_proj",
        },
        bare=MAMBA_BARE,
        gate_up="mlp.gate_up_proj",
    ),
    implied={"normalization_function": ("rmsnorm",)},
)
