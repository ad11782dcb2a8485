"""GLM-4 9B of 2024; GLM-4, with norms around both branches; GLM-4.5, with experts. All turn half of each head.

The pairs of the first two stand side by side, and their gate and up in one tensor. GLM-4.5's first layers have no
experts, its others a shared one, too; its checkpoints have a layer more, which guesses further tokens and is left out.
"""

from __future__ import annotations

from typing import Any

from evalengine.kernels.mixture_variant import Mixture
from evalengine.models.describe import describe, first_dense, grouped_router, rope_of
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.registry import Family
from evalengine.models.spec import PLAIN, Block, ModelSpec
from evalengine.models.weight_names import SHARED_EXPERTS, WeightNames


def _spec(family: Family, config: Any, block: Block = PLAIN[0]) -> ModelSpec:
    rope = rope_of(config, interleaved=True)
    return describe(family, config, biases=(config.attention_bias, False), rope=rope, blocks=(block,))


def _glm4(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, Block(norm_after=True))


def _moe(family: Family, config: Any) -> ModelSpec:
    inner = config.moe_intermediate_size
    mixture = Mixture(grouped_router(config), inner, shared_size=inner * config.n_shared_experts)
    blocks = first_dense(config, Block(mixture=mixture))
    biases = (config.attention_bias, False)
    return describe(family, config, biases=biases, qk_norm=config.use_qk_norm, blocks=blocks)


GLM = Family(
    "GlmForCausalLM", "glm", _spec, frozenset({"partial_rotary_factor"}), WeightNames(gate_up="mlp.gate_up_proj")
)
GLM4 = Family(
    "Glm4ForCausalLM",
    "glm4",
    _glm4,
    frozenset({"partial_rotary_factor"}),
    WeightNames(
        parts={"post_self_attn_layernorm": "attention_output_norm", "post_mlp_layernorm": "mlp_output_norm"},
        gate_up="mlp.gate_up_proj",
    ),
    GGUFForm("glm4"),
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _moe,
    frozenset(
        {
            *("partial_rotary_factor", "use_qk_norm", "n_routed_experts", "num_local_experts", "num_experts_per_tok"),
            *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "moe_intermediate_size"),
            *("n_shared_experts", "first_k_dense_replace"),
        }
    ),
    WeightNames(parts=SHARED_EXPERTS),
)
