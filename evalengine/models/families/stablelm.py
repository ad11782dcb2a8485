"""StableLM 2: a Llama with layer norms and RoPE on a quarter of a head.

The 12B model norms each head of q and k by separate weights.
"""

from __future__ import annotations

from typing import Any

from evalengine.layers.variants import Norm
from evalengine.models.describe import activation_of, describe
from evalengine.models.gguf_form import Config, GGUFForm, Metadata
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec


def _spec(family: Family, config: Any) -> ModelSpec:
    block = Block(
        qk_norm_of="each head" if config.qk_layernorm else "head",
        parallel="one norm" if config.use_parallel_residual else None,
        activation=activation_of(config),
    )
    return describe(
        family,
        config,
        biases=(config.use_qkv_bias, False),
        qk_norm=config.qk_layernorm,
        eps="layer_norm_eps",
        blocks=(block,),
        norm=Norm(eps=0.0, kind="layer", cast_first=False, bias=True),
    )


def _gguf(metadata: Metadata, config: Config) -> None:
    config["use_qkv_bias"] = metadata.biased("attn_q")
    config["use_parallel_residual"] = metadata.boolean("use_parallel_residual", False)


STABLELM = Family(
    "StableLmForCausalLM",
    "stablelm",
    _spec,
    frozenset(
        {
            "hidden_act",
            "layer_norm_eps",
            "partial_rotary_factor",
            "qk_layernorm",
            "use_parallel_residual",
            "use_qkv_bias",
        }
    ),
    gguf=GGUFForm("stablelm", _gguf, eps="layer_norm_eps"),
)
