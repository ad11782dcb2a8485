"""Granite 3 and 4, dense or with experts: a Llama with factors of its embedding, scores, branches and logits."""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import describe
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

EXPERTS = {  # a mixture's parts in checkpoints of transformers 4 and 5 -> the decoder's names
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "mlp.experts.down_proj",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
}
_READS = frozenset({"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"})


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
