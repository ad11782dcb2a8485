"""Nemotron-H: each layer is one branch: Mamba-2, attention without RoPE, or a feed-forward with relu(x)^2."""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.recurrent_variant import Mamba2
from evalengine.layers.variants import Norm
from evalengine.models.describe import activation_of, describe
from evalengine.models.file_values import shown
from evalengine.models.registry import Family, NotNative
from evalengine.models.rope import NO_ROPE
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

_READS = frozenset(
    {
        *("layers_block_type", "layer_types", "hybrid_override_pattern", "layer_norm_epsilon", "mlp_hidden_act"),
        *("mlp_bias", "use_bias", "use_conv_bias", "mamba_hidden_act", "mamba_num_heads", "mamba_head_dim", "n_groups"),
        *("ssm_state_size", "conv_kernel", "expand", "chunk_size", "time_step_min", "time_step_limit", "no_rope"),
        # Names of some of them in other versions of these models' code.
        *("mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_dt_min", "mamba_dt_limit", "mamba_conv_bias"),
        "mamba_chunk_size",
        *("mamba_proj_bias", "mamba_ssm_cache_dtype", "time_step_rank"),  # no code of this model reads them
        # What experts have, of which a model without has none.
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
        *("moe_shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    }
)
_KINDS = {  # transformers 5's names of the kinds of layers, and those that earlier versions have
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
}


def _spec(family: Family, config: Any) -> ModelSpec:
    kinds = config.layers_block_type
    if others := sorted({str(kind) for kind in kinds} - _KINDS.keys()):
        raise NotNative(f"layers_block_type: layers of {', '.join(others)} are not supported (experts among them)")
    if config.mamba_hidden_act not in ("silu", "swish"):
        raise ConfigError(f"mamba_hidden_act={shown(config.mamba_hidden_act)}: only silu is supported")
    if config.sliding_window is not None or config.tie_word_embeddings:
        raise ConfigError("sliding_window, tie_word_embeddings: must be null and false for this model")
    common = {"gated": False, "activation": activation_of(config, "mlp_hidden_act"), "mlp_bias": config.mlp_bias}
    scan = Mamba2(
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        num_groups=config.n_groups,
        state_dim=config.ssm_state_size,
        taps=config.conv_kernel,
        conv_bias=config.use_conv_bias,
        bias=config.use_bias,
        dt_limits=(float(config.time_step_min), None),  # transformers' `NemotronHMamba2Mixer.time_step_limit`
    )
    blocks = {
        "mamba": Block(only="mixer", recurrence=scan, **common),
        "attention": Block(only="mixer", **common),
        "mlp": Block(only="feed-forward", **common),
    }
    return describe(
        family,
        config,
        rope=NO_ROPE,
        eps="layer_norm_epsilon",
        blocks=tuple(blocks[_KINDS[kind]] for kind in kinds),
        norm=Norm(eps=0.0, cast_first=False),
    )


NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    _spec,
    _READS,
    WeightNames(
        prefixes={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.norm_f.": "model.norm.",
            "backbone.": "model.",
            "model.embeddings.": "model.embed_tokens.",
            "model.norm_f.": "model.norm.",
        },
        parts={
            "norm": "input_layernorm",
            "mixer.conv1d": "mixer.conv",
            **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
            "mixer.up_proj": "mlp.up_proj",
            "mixer.down_proj": "mlp.down_proj",
        },
        bare=(".A_log", ".dt_bias", ".D"),
    ),
)
