"""DeepSeek V2 and V3, GLM-4.7-Flash: latent attention; after the first layers experts and one that all tokens share.

Keys and values are stored expanded, all heads' of them. A checkpoint's layers after the last one guess further tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.attention_variant import Latent
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import describe, first_dense, grouped_router, rope_of
from evalengine.models.file_values import is_integer, shown
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import SHARED_EXPERTS, WeightNames

_V3 = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
_V2 = {"scoring_func": ("softmax",), "norm_topk_prob": (False,), "moe_layer_freq": (1,)}
_READS = frozenset(
    {
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim"),
        *("rope_interleave", "n_routed_experts", "num_local_experts", "num_experts_per_tok", "n_group", "topk_group"),
        *("routed_scaling_factor", "moe_intermediate_size", "n_shared_experts", "norm_topk_prob"),
    }
)


def _block(config: Any, router: Router) -> Block:
    """A layer with experts."""
    sizes = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.n_shared_experts)
    if not all(is_integer(size, 1, 1 << 12) for size in sizes):
        raise ConfigError(f"qk_nope_head_dim, qk_rope_head_dim, v_head_dim, n_shared_experts={sizes}: must be numbers")
    inner = config.moe_intermediate_size
    return Block(
        scale=_scale(config),
        mixture=Mixture(router, inner, shared_size=inner * config.n_shared_experts),
        latent=Latent(config.kv_lora_rank, config.v_head_dim, config.qk_rope_head_dim, config.q_lora_rank),
    )


def _v3_block(config: Any) -> Block:
    return _block(config, grouped_router(config))


def _v2_block(config: Any) -> Block:
    """V2 looks at the best expert of each group, where it has groups, and leaves the softmax's weights as they are."""
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method={shown(config.topk_method)}: supported are greedy and group_limited_greedy")
    in_groups = config.topk_method != "greedy"
    router = Router(
        config.n_routed_experts,
        config.num_experts_per_tok,
        wide=True,
        groups=config.n_group if in_groups else 1,
        kept_groups=config.topk_group if in_groups else 1,
        group_best=1,
        scaling=float(config.routed_scaling_factor),
        rounded=False,
    )
    return _block(config, router)


def _scale(config: Any) -> float:
    """transformers' `yarn_apply_mscale`: what YaRN takes from cosines and sines it gives to the scores."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    parameters = config.rope_parameters
    of_all = parameters.get("mscale_all_dim")
    if parameters.get("rope_type", "default") == "default" or not of_all or parameters["factor"] <= 1:
        return scale
    mscale = 0.1 * of_all * math.log(parameters["factor"]) + 1.0
    return scale * mscale * mscale


def _spec(
    family: Family, config: Any, blocks: tuple[Block, ...], *, interleaved: bool, wide: bool = False
) -> ModelSpec:
    turned = config.qk_rope_head_dim
    rope = rope_of(config, rotary_dim=turned, at_end=True, interleaved=interleaved, wide=wide)
    spec = describe(family, config, rope=rope, blocks=blocks)
    return replace(spec, head_dim=config.qk_nope_head_dim + turned, num_kv_heads=spec.num_heads)


def _deepseek_v2(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, first_dense(config, _v2_block(config)), interleaved=True, wide=True)


def _deepseek_v3(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, first_dense(config, _v3_block(config)), interleaved=bool(config.rope_interleave))


def _glm_lite(family: Family, config: Any) -> ModelSpec:
    kinds = config.mlp_layer_types
    known = isinstance(kinds, list) and len(kinds) == config.num_hidden_layers and {*kinds} <= {"dense", "sparse"}
    if not known:
        raise ConfigError(f"mlp_layer_types={shown(kinds)}: must say dense or sparse of each layer")
    # Published files have this field instead. transformers ignores it and makes the first layer dense by default.
    dense = getattr(config, "first_k_dense_replace", None)
    layers = len(kinds)
    if dense is not None and not (
        is_integer(dense, 0, layers) and kinds == ["dense"] * dense + ["sparse"] * (layers - dense)
    ):
        raise ConfigError(
            f"first_k_dense_replace={shown(dense)}: transformers does not read it and has {kinds.count('dense')} "
            "dense layers; set mlp_layer_types to the kind of each layer"
        )
    block = _v3_block(config)
    blocks = tuple(block if kind == "sparse" else replace(block, mixture=None) for kind in kinds)
    return _spec(family, config, blocks, interleaved=bool(config.rope_interleave))


_NAMES = WeightNames(parts=SHARED_EXPERTS)
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    _deepseek_v2,
    (_READS - {"rope_interleave", "norm_topk_prob"}) | {"first_k_dense_replace", "num_experts", "topk_method"},
    _NAMES,
    implied=_V2,
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM", "deepseek_v3", _deepseek_v3, _READS | {"first_k_dense_replace"}, _NAMES, implied=_V3
)
GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    _glm_lite,
    _READS | {"mlp_layer_types", "first_k_dense_replace"},
    _NAMES,
    implied=_V3,
)
