"""OLMoE: a Llama all of whose layers have experts, and whose norms of q and k span all heads."""

from __future__ import annotations

from typing import Any

from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import describe
from evalengine.models.gguf_form import GGUFForm, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    router = Router(config.num_experts, config.num_experts_per_tok, normed=config.norm_topk_prob)
    block = Block(qk_norm_of="vector", mixture=Mixture(router, config.intermediate_size))
    return describe(family, config, qk_norm=True, blocks=(block,))


OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    _spec,
    frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"}),
    gguf=GGUFForm("olmoe", named(expert_count="num_experts", expert_used_count="num_experts_per_tok")),
)
