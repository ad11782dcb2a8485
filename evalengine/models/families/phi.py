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
from evalengine.models.gguf_form import Config, GGUFForm, Metadata
from evalengine.models.registry import Family
from evalengine.models.rope import RopeSpec
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames


def _spec(family: Family, config: Any) -> ModelSpec:
    block = Block() if config.sliding_window is None else Block(window=window(config))
    if config.rope_parameters.get("rope_type") != "longrope":
        return describe(family, config, biases=(False, False), blocks=(block,))
    return describe(family, config, biases=(False, False), rope=_longrope(config), blocks=(block,))


def _growth(stretched: float, original: int) -> float:
    """The factor of cos and sin."""
    return math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0


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
    grown = _growth(stretched, original)
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


def _gguf(metadata: Metadata, config: Config) -> None:
    """The window (llama.cpp leaves it out, the model has it) and LongRoPE, whose lists are tensors."""
    config["sliding_window"] = metadata.integer("attention.sliding_window") or None
    long, short = (metadata.factors(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is None or short is None:
        return
    original = metadata.integer("rope.scaling.original_context_length")
    config["original_max_position_embeddings"] = original
    config["rope_parameters"] |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    # Written as float32: what it is by the formula is left to the formula.
    given = metadata.number("rope.scaling.attn_factor")
    if given is not None and is_integer(original, 2):
        grown = _growth(config["max_position_embeddings"] / original, original)
        config["rope_parameters"] |= {} if math.isclose(given, grown, rel_tol=1e-6) else {"attention_factor": given}


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    _spec,
    frozenset({"sliding_window", "partial_rotary_factor", "longrope", "original_max_position_embeddings"}),
    WeightNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    GGUFForm("phi3", _gguf),
    implied={"full_attn_mod": (1,), "interpolate_factor": (1,)},
)
