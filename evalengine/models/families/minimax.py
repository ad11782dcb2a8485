"""MiniMax-M2: experts chosen by sigmoids in every layer, norms of q and k that span all heads, RoPE on half of each."""

from __future__ import annotations

from typing import Any

from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import describe
from evalengine.models.families.mixtral import EXPERT_PARTS
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    router = Router(experts, chosen, "sigmoid", choice_bias=True, normed=True, rounded=False)
    block = Block(qk_norm_of="vector", mixture=Mixture(router, config.intermediate_size))
    return describe(family, config, biases=(False, False), qk_norm=True, blocks=(block,))


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    _spec,
    frozenset({"num_local_experts", "num_experts", "num_experts_per_tok", "partial_rotary_factor", "rotary_dim"}),
    WeightNames(
        parts={
            "block_sparse_moe.gate": "mlp.gate",
            "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        },
        expert_parts=EXPERT_PARTS,
    ),
    implied={
        "scoring_func": ("sigmoid",),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "attn_type_list": (1,),
    },
)
