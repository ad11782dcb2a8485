"""Phi-3, 3.5 and 4: q, k and v in one tensor, gate and up in one, and RoPE on a part of the head in the small ones.

LongRoPE divides the frequencies by one list of factors up to `original_max_position_embeddings` and by another beyond.
transformers takes the one that the longest row of a batch needs, so that a short row's logits depend on its neighbours
(a row of 40 tokens by 1.9 nats). Here each request has one, before its first token: the long one if it may have more
tokens in all than the original length (prompt and `max_tokens`; of a score, the tokens that are fed).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from evalengine.errors import ConfigError
from evalengine.models.describe import describe, rope_of, window
from evalengine.models.file_values import is_integer
from evalengine.models.registry import Family
from evalengine.models.rope import RopeSpec
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    block = Block() if config.sliding_window is None else Block(window=window(config))
    if config.rope_parameters.get("rope_type") != "longrope":
        return describe(family, config, blocks=(block,))
    return describe(family, config, rope=_longrope(config), blocks=(block,))


def _longrope(config: Any) -> RopeSpec:
    """transformers' `_compute_longrope_parameters`."""
    parameters = config.rope_parameters
    original = config.original_max_position_embeddings or parameters.get("original_max_position_embeddings")
    short, long = parameters.get("short_factor"), parameters.get("long_factor")
    given = parameters.get("attention_factor")
    if not is_integer(original, 2) or not isinstance(short, list) or not isinstance(long, list):
        wanted = "short_factor, long_factor and original_max_position_embeddings"
        raise ConfigError(f"rope_parameters: longrope needs {wanted}")
    stretched = parameters.get("factor") or config.max_position_embeddings / original
    grown = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    plain = rope_of(config)
    return replace(
        plain,
        type="factors",
        factor=1.0,
        freq_factors=tuple(short),
        long_factors=tuple(long),
        original_max_position_embeddings=original,
        attention_factor=grown if given is None else given,
    )


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    _spec,
    frozenset({"sliding_window", "partial_rotary_factor", "longrope", "original_max_position_embeddings"}),
    WeightNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
)
