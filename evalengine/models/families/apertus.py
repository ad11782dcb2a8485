"""Apertus: a Llama with norms of each head's query and key, and xIELU in place of the gated feed-forward."""

from __future__ import annotations

from typing import Any

from evalengine.models.describe import activation_of, describe
from evalengine.models.registry import Family
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    activation = "xielu" if config.hidden_act == "xielu" else activation_of(config)
    return describe(family, config, qk_norm=True, blocks=(Block(activation=activation, gated=False),))


APERTUS = Family(
    "ApertusForCausalLM",
    "apertus",
    _spec,
    frozenset({"hidden_act"}),
    WeightNames(
        parts={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
        bare=(".act_fn.alpha_p", ".act_fn.alpha_n", ".act_fn.beta", ".act_fn.eps"),
    ),
    implied={"qk_norm": (True,), "post_norm": (False,)},
)
