"""Granite 3 and 4: a Llama, dense or with experts, with factors of its embedding, scores, branches and logits; hybrids
have Mamba-2 in most layers, or in none, and attention without RoPE in the others.

A hybrid's layer has one feed-forward, in some sizes next to experts.
"""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import by_layer, describe, mamba2_of, rope_of
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, named
from evalengine.models.registry import Family
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import MAMBA, MAMBA_BARE, WeightNames

EXPERTS = {  # a mixture's parts in checkpoints of transformers 4 and 5 -> the decoder's names
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "mlp.experts.down_proj",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
}
_READS = frozenset({"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"})
_HYBRID_READS = frozenset(
    {
        *_READS,
        "layer_types",
        *("layers_block_type", "position_embedding_type", "shared_intermediate_size", "num_local_experts"),
        *("num_experts_per_tok", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        *("mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "mamba_chunk_size", "time_step_limit", "time_step_min"),
    }
)


def _spec(family: Family, config: Any, *, mlp_bias: bool = False, mixture: Mixture | None = None) -> ModelSpec:
    block = Block(
        scale=config.attention_multiplier, residual_scale=config.residual_multiplier, mlp_bias=mlp_bias, mixture=mixture
    )
    return describe(
        family,
        config,
        blocks=(block,),
        embedding_scale=config.embedding_multiplier,
        logits_scale=1.0 / config.logits_scaling,
    )


def _dense(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, mlp_bias=config.mlp_bias)


def _moe(family: Family, config: Any) -> ModelSpec:
    router = Router(config.num_local_experts, config.num_experts_per_tok, scores="logit")
    return _spec(family, config, mixture=Mixture(router, config.intermediate_size))


def _hybrid(family: Family, config: Any) -> ModelSpec:
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


_factors = named(
    embedding_scale="embedding_multiplier",
    logit_scale="logits_scaling",
    residual_scale="residual_multiplier",
)


def _gguf(metadata: Metadata, config: Config) -> None:
    if not metadata.boolean("rope.scaling.finetuned", True):
        raise ConfigError("rope.scaling.finetuned=false: no layer would have positions, which is not supported")
    _factors(metadata, config)
    config["attention_multiplier"] = metadata.number("attention.scale") or config["head_dim"] ** -0.5


def _gguf_dense(metadata: Metadata, config: Config) -> None:
    _gguf(metadata, config)  # a Granite 4 without experts has the shared expert's feed-forward alone
    config["intermediate_size"] = metadata.integer("expert_shared_feed_forward_length") or config["intermediate_size"]


def _gguf_moe(metadata: Metadata, config: Config) -> None:
    _gguf(metadata, config)
    named(expert_count="num_local_experts", expert_used_count="num_experts_per_tok")(metadata, config)


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    _dense,
    _READS | {"mlp_bias"},
    gguf=GGUFForm("granite", _gguf_dense, permuted=True),
)
GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    _moe,
    _READS | {"num_local_experts", "num_experts_per_tok"},
    WeightNames(parts=EXPERTS),
    GGUFForm("granitemoe", _gguf_moe, permuted=True),
)
GRANITE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    _hybrid,
    _HYBRID_READS,
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
