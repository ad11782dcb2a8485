"""Mixtral: a Mistral all of whose layers have experts; their weights are not rounded before they multiply."""

from __future__ import annotations

from typing import Any

from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import describe, window
from evalengine.models.gguf_form import GGUFForm, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

EXPERT_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_READS = frozenset({"sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"})


def _spec(family: Family, config: Any) -> ModelSpec:
    router = Router(config.num_local_experts, config.num_experts_per_tok, normed=True, rounded=False)
    seen = None if config.sliding_window is None else window(config)
    block = Block(window=seen, mixture=Mixture(router, config.intermediate_size))
    return describe(family, config, biases=(False, False), blocks=(block,))


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    _spec,
    _READS,
    WeightNames(parts={"block_sparse_moe.gate": "mlp.gate"}, expert_parts=EXPERT_PARTS),
    GGUFForm(
        "llama",
        named(expert_count="num_local_experts", expert_used_count="num_experts_per_tok"),
        when="expert_count",
        permuted=True,
    ),
)
