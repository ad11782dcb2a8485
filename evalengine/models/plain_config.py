"""Reads the config.json of common dense models as transformers' configuration classes do, without their import, which
takes longer than torch's.

Anything unusual is left to transformers: another model type, a field that the class would have to supply or check, a
RoPE with settings of its own, a window. `TYPES` lists the types; a test compares them with transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch

from evalengine.models.file_values import decoded

Kind = Callable[[Any], bool]


def _of(*kinds: type) -> Kind:
    return lambda value: type(value) in kinds


_INTEGER, _BOOLEAN, _OPTIONAL = _of(int), _of(bool), _of(int, type(None))
_OF_ALL: Mapping[str, Kind] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), _INTEGER),
    **dict.fromkeys(("num_attention_heads", "max_position_embeddings"), _INTEGER),
    "num_key_value_heads": _OPTIONAL,
    "rms_norm_eps": _of(float),
    "hidden_act": _of(str),
    "tie_word_embeddings": _BOOLEAN,
    "bos_token_id": _OPTIONAL,
}
_WINDOWS: Mapping[str, Kind] = {
    "use_sliding_window": lambda value: value is False,
    "sliding_window": _OPTIONAL,
    "max_window_layers": _INTEGER,
    "layer_types": _of(list, type(None)),
}
_FACTORS = dict.fromkeys(
    ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), _of(int, float)
)
_USUAL = {"tie_word_embeddings": False, "hidden_act": "silu"}
# Model type -> (the fields of its class that are read, with the values that are taken here; those that a file may leave
# out, with the class's defaults).
TYPES: Mapping[str, tuple[Mapping[str, Kind], Mapping[str, Any]]] = {
    "llama": (
        {**_OF_ALL, "head_dim": _OPTIONAL, "attention_bias": _BOOLEAN, "mlp_bias": _BOOLEAN},
        {**_USUAL, "head_dim": None, "attention_bias": False, "mlp_bias": False, "num_key_value_heads": None,
         "bos_token_id": 1},
    ),
    "mistral": (
        {**_OF_ALL, "num_key_value_heads": _INTEGER, "head_dim": _OPTIONAL, "sliding_window": _OPTIONAL},
        {**_USUAL, "head_dim": None},
    ),
    "olmo2": ({**_OF_ALL, "attention_bias": _BOOLEAN}, {**_USUAL, "attention_bias": False, "bos_token_id": None}),
    "granite": (
        {**_OF_ALL, **_FACTORS, "attention_bias": _BOOLEAN, "mlp_bias": _BOOLEAN},
        {**_USUAL, "attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": (
        {**_OF_ALL, **_WINDOWS},
        {**_USUAL, "use_sliding_window": False, "max_window_layers": 28, "bos_token_id": None, "sliding_window": None,
         "layer_types": None},
    ),
    "qwen3": (
        {**_OF_ALL, **_WINDOWS, "head_dim": _INTEGER, "attention_bias": _BOOLEAN},
        {**_USUAL, "use_sliding_window": False, "max_window_layers": 28, "bos_token_id": None, "sliding_window": None,
         "layer_types": None, "attention_bias": False},
    ),
}  # fmt: skip
# Settings that stay as the file has them, for any class.
_KEPT = ("architectures", "model_type", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
_ROPE = ("rope_scaling", "rope_parameters", "rope_theta")
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# Type of RoPE -> the settings that it has; all of them.
_OF_ROPE: Mapping[str, Set[str]] = {"default": set(), "linear": {"factor"}, "llama3": _LLAMA3}


def plain_config(raw: Mapping[str, Any], read: Set[str]) -> Any | None:
    """The configuration that transformers' class makes of config.json's content, with the fields `read`; None for one
    that is left to transformers."""
    if (known := TYPES.get(raw["model_type"])) is None:
        return None
    kinds, defaults = known
    others = [name for name in raw.keys() & read if name not in (*kinds, *_KEPT, *_ROPE)]
    if any(raw[name] is not None for name in others) or "original_max_position_embeddings" in raw:
        return None
    taken = (name for name in raw if name in (*kinds, *_KEPT, *others) and name != "partial_rotary_factor")
    values = {"architectures": None, **defaults, **{name: decoded(raw[name]) for name in taken}}
    if "eos_token_id" not in raw or not all(
        name in values and is_kind(values[name]) for name, is_kind in kinds.items()
    ):
        return None
    config = SimpleNamespace(**values)
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if config.hidden_size % config.num_attention_heads:
        return None
    if "head_dim" in kinds:
        if config.head_dim is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        if config.head_dim % 2:
            return None
    if "use_sliding_window" in kinds:
        every = ["full_attention"] * config.num_hidden_layers
        if config.layer_types not in (None, every):
            return None
        config.sliding_window, config.layer_types = None, every
    config.rope_parameters = _rope(raw, config.max_position_embeddings)
    dtype = config.dtype if getattr(config, "dtype", None) is not None else getattr(config, "torch_dtype", None)
    config.dtype = None if dtype is None else getattr(torch, dtype)
    return None if config.rope_parameters is None else config


def _rope(raw: Mapping[str, Any], longest: int) -> dict[str, Any] | None:
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    settings = _OF_ROPE.get(rope["rope_type"]) if isinstance(rope["rope_type"], str) else None
    if rope["rope_type"] == "llama3":
        rope.setdefault("original_max_position_embeddings", longest)
    if settings is None or rope.keys() - {"rope_theta", "rope_type", "type"} != settings:
        return None
    return rope if all(type(rope[name]) in (int, float) for name in (*settings, "rope_theta")) else None
