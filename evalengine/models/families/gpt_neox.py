"""GPT-NeoX, of which Pythia is the family: layer norms, parallel branches, RoPE on a quarter of a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evalengine.layers.variants import LAYER_NORM
from evalengine.models.describe import activation_of, describe
from evalengine.models.gguf_form import GGUFForm, named
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    block = Block(activation=activation_of(config), gated=False, mlp_bias=True)
    if config.use_parallel_residual:
        block = replace(block, parallel="two norms")
    return describe(family, config, eps="layer_norm_eps", blocks=(block,), norm=LAYER_NORM)


GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    _spec,
    frozenset(
        {
            *("hidden_act", "layer_norm_eps", "use_parallel_residual", "partial_rotary_factor", "rotary_pct"),
            "rotary_emb_base",
        }
    ),
    WeightNames(
        prefixes={
            "gpt_neox.embed_in.": "model.embed_tokens.",
            "gpt_neox.final_layer_norm.": "model.norm.",
            "gpt_neox.": "model.",
            "embed_out.": "lm_head.",
        },
        parts={
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            "mlp.dense_h_to_4h": "mlp.up_proj",
            "mlp.dense_4h_to_h": "mlp.down_proj",
        },
        buffers=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
        qkv="self_attn.qkv_proj",
        qkv_by_head=True,
    ),
    GGUFForm("gptneox", named(use_parallel_residual="use_parallel_residual"), eps="layer_norm_eps"),
)
