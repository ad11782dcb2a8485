"""Translates a Hugging Face model's config.json into a `ModelSpec`.

Settings that the engine cannot compute faithfully (an active sliding window, an unknown RoPE type, packed quantised
weights) are refused here, all at once. transformers' configuration classes supply the defaults and RoPE's old
spellings. They are given only the fields that `config_fields` says are read: any other would become an attribute of
theirs, and `num_labels` of a billion a dictionary of a billion labels. Fields that the classes use before they check
them are checked here first.

Importing transformers takes longer than importing torch, so `plain_config` reads common dense models as its classes do.
Anything unusual is left to them: a field that the class would supply or check, an unknown RoPE setting, a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from evalengine.errors import ConfigError
from evalengine.models.config_fields import (
    READ,
    ROPE_READ,
    ROPE_WITHOUT_EFFECT,
    SAME_AS,
    contradicting_fields,
    refused_fields,
    unknown_fields,
)
from evalengine.models.describe import with_original_length
from evalengine.models.file_values import decoded, is_integer, is_number, one_line, shown
from evalengine.models.packing import packing_problems
from evalengine.models.registry import Family, NotNative, family_of_type, find_family_of_type, get_family
from evalengine.models.spec import ModelSpec
from evalengine.models.spec_checks import LARGEST, size_demanded, spec_problems

# What a model of several parts says for all of them, where its text part does not.
_OF_BOTH_PARTS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
_ROPE_NUMBERS = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_NUMBERS = {"rope_theta", "rope_local_base_freq", "rms_norm_eps"}  # of config.json itself
_ROPE_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}  # numbers or null
# RoPE's `type` and `rope_type` where transformers saves both for one RoPE.
_RENAMED = {("su", "longrope"), ("yarn", "longrope"), ("mrope", "default")}
# `ModelSpec`'s name -> config.json's name, where they differ.
_JSON_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
    "rope.theta": "rope_parameters.rope_theta",
}
Kind = Callable[[Any], bool]


def _kinds(*kinds: type) -> Kind:
    return lambda value: type(value) in kinds


_INTEGER, _BOOLEAN, _OPTIONAL = _kinds(int), _kinds(bool), _kinds(int, type(None))
_COMMON: Mapping[str, Kind] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), _INTEGER),
    **dict.fromkeys(("num_attention_heads", "max_position_embeddings"), _INTEGER),
    "num_key_value_heads": _OPTIONAL,
    "rms_norm_eps": _kinds(float),
    "hidden_act": _kinds(str),
    "tie_word_embeddings": _BOOLEAN,
    "bos_token_id": _OPTIONAL,
}
_WINDOWS: Mapping[str, Kind] = {
    "use_sliding_window": lambda value: value is False,
    "sliding_window": _OPTIONAL,
    "max_window_layers": _INTEGER,
    "layer_types": _kinds(list, type(None)),
}
_FACTORS = dict.fromkeys(
    ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), _kinds(int, float)
)
_USUAL = {"tie_word_embeddings": False, "hidden_act": "silu"}
# Model type that is read without transformers -> (the fields of its class that are read, with the values that are taken
# here; those that a file may leave out, with the class's defaults). A test compares them with transformers' classes.
PLAIN_TYPES: Mapping[str, tuple[Mapping[str, Kind], Mapping[str, Any]]] = {
    "llama": (
        {**_COMMON, "head_dim": _OPTIONAL, "attention_bias": _BOOLEAN, "mlp_bias": _BOOLEAN},
        {**_USUAL, "head_dim": None, "attention_bias": False, "mlp_bias": False, "num_key_value_heads": None,
         "bos_token_id": 1},
    ),
    "mistral": (
        {**_COMMON, "num_key_value_heads": _INTEGER, "head_dim": _OPTIONAL, "sliding_window": _OPTIONAL},
        {**_USUAL, "head_dim": None},
    ),
    "olmo2": ({**_COMMON, "attention_bias": _BOOLEAN}, {**_USUAL, "attention_bias": False, "bos_token_id": None}),
    "granite": (
        {**_COMMON, **_FACTORS, "attention_bias": _BOOLEAN, "mlp_bias": _BOOLEAN},
        {**_USUAL, "attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": (
        {**_COMMON, **_WINDOWS},
        {**_USUAL, "use_sliding_window": False, "max_window_layers": 28, "bos_token_id": None, "sliding_window": None,
         "layer_types": None},
    ),
    "qwen3": (
        {**_COMMON, **_WINDOWS, "head_dim": _INTEGER, "attention_bias": _BOOLEAN},
        {**_USUAL, "use_sliding_window": False, "max_window_layers": 28, "bos_token_id": None, "sliding_window": None,
         "layer_types": None, "attention_bias": False},
    ),
}  # fmt: skip
# Settings that stay as the file has them, for any class.
_UNCHANGED = ("architectures", "model_type", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
_ROPE_FIELDS = ("rope_scaling", "rope_parameters", "rope_theta")
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# Type of RoPE -> the settings that it has; all of them.
_ROPE_SETTINGS: Mapping[str, Set[str]] = {"default": set(), "linear": {"factor"}, "llama3": _LLAMA3}


def spec_from_json(raw: Mapping[str, Any]) -> ModelSpec:
    """The `ModelSpec` of config.json's content, as transformers would understand it.

    Raises `ConfigError` that lists everything that is not supported or cannot be meant, also the model itself; it is a
    `NotNative` where transformers' own module computes all of it.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        is_a = f"its model_type is {shown(model_type)}" if "model_type" in raw else "config.json has no model_type"
        raise ConfigError(f"{is_a}; it is not a Hugging Face model's configuration")
    family = find_family_of_type(model_type)
    if family is not None and family.wraps is not None:
        return _of_text_part(raw, family)
    problems: list[str] = []
    if family is not None:  # those of an unknown type would only hide that it is unknown
        if raw.get("is_causal", True) is not True:  # read by transformers' code, though not declared by its classes
            problems.append(
                f"is_causal={shown(raw['is_causal'])}: attention is causal here; other attention is not supported"
            )
        problems += refused_fields(raw, _read(family), family.implied)
    try:
        spec = _plain_spec(raw, family) or from_hf(_configuration(raw, family))
    except NotNative as error:
        # Without a spec to compare with, any field that may contradict it counts. Wrong sizes show in the tensors.
        may = {name for name, own in SAME_AS.items() if own not in LARGEST} | {"query_pre_attn_scalar", "rotary_dim"}
        named = [name for name in sorted(raw.keys() & may - _known(family)) if raw[name] is not None]
        problems += [f"{name}={shown(raw[name])}: transformers ignores it" for name in named]
        if not problems:
            raise
        raise ConfigError([*error.problems, *_of_family(family, problems)]) from error
    except ConfigError as error:
        raise ConfigError([*error.problems, *_of_family(family, problems)]) from error
    if problems := [*problems, *contradicting_fields(raw, spec, _known(family))]:
        raise ConfigError(_of_family(family, problems))
    return spec


def _plain_spec(raw: Mapping[str, Any], family: Family | None) -> ModelSpec | None:
    """The spec without transformers; None for what it must read, or must report an error of."""
    config = (
        None if family is None or any(_json_problems(raw, family)) else plain_config(raw, _read(family) - {"is_causal"})
    )
    if config is not None:
        with suppress(ConfigError, ArithmeticError, AttributeError, TypeError, ValueError):
            return from_hf(config)
    return None


def plain_config(raw: Mapping[str, Any], read: Set[str]) -> Any | None:
    """The configuration that transformers' class makes of config.json's content, with the fields `read`; None for one
    that is left to transformers."""
    if (known := PLAIN_TYPES.get(raw["model_type"])) is None:
        return None
    kinds, defaults = known
    others = [name for name in raw.keys() & read if name not in (*kinds, *_UNCHANGED, *_ROPE_FIELDS)]
    if any(raw[name] is not None for name in others) or "original_max_position_embeddings" in raw:
        return None
    taken = (name for name in raw if name in (*kinds, *_UNCHANGED, *others) and name != "partial_rotary_factor")
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
    config.rope_parameters = _plain_rope(raw, config.max_position_embeddings)
    dtype = config.dtype if getattr(config, "dtype", None) is not None else getattr(config, "torch_dtype", None)
    config.dtype = None if dtype is None else getattr(torch, dtype)
    return None if config.rope_parameters is None else config


def _plain_rope(raw: Mapping[str, Any], longest: int) -> dict[str, Any] | None:
    """`rope_parameters` of transformers' class; None for one that is left to transformers."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    settings = _ROPE_SETTINGS.get(rope["rope_type"]) if isinstance(rope["rope_type"], str) else None
    if rope["rope_type"] == "llama3":
        rope.setdefault("original_max_position_embeddings", longest)
    if settings is None or rope.keys() - {"rope_theta", "rope_type", "type"} != settings:
        return None
    return rope if all(type(rope[name]) in (int, float) for name in (*settings, "rope_theta")) else None


def unread_fields(raw: Mapping[str, Any]) -> list[str]:
    """Return the fields of config.json's content and of its text part that neither we nor transformers know."""
    model_type = raw.get("model_type")
    family = find_family_of_type(model_type) if isinstance(model_type, str) else None
    fields = unknown_fields(raw, _known(family))
    text = raw.get("text_config")
    if family is not None and family.wraps is not None and isinstance(text, Mapping):
        fields += unknown_fields(text, _known(find_family_of_type(str(text.get("model_type", family.wraps)))))
    return list(dict.fromkeys(fields))


def _of_text_part(raw: Mapping[str, Any], family: Family) -> ModelSpec:
    """The spec of the text part of a model of texts and images."""
    from transformers import CONFIG_MAPPING

    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"{family.architecture}: text_config={shown(text)}: must be an object")
    kind = getattr(CONFIG_MAPPING[family.model_type].sub_configs["text_config"], "model_type", None)
    if kind and text.get("model_type", kind) != kind:
        raise ConfigError(
            f"{family.architecture}: text_config.model_type={shown(text['model_type'])}: must be {kind!r}"
        )
    shared = {name: raw[name] for name in _OF_BOTH_PARTS if raw.get(name) is not None}
    inner = {**shared, "model_type": family.wraps, **text}
    inner.pop("architectures", None)
    return replace(spec_from_json(inner), architecture=family.architecture)


def from_hf(config: Any) -> ModelSpec:
    """The `ModelSpec` of a transformers `PretrainedConfig`; for an unknown model type, an object with config.json's
    values will do.

    Raises `ConfigError` that lists everything that is not supported, also the model itself; it is a `NotNative` where
    transformers' own module computes all of it.
    """
    known = find_family_of_type(config.model_type)
    problems, gaps = list(_unsupported(config, known)), list(_gaps(config, known))
    try:
        family = _family(config)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems, *gaps]) from error
    spec = None
    turned = _thetas(getattr(config, "rope_parameters", None)) or "no_rope" in family.reads
    if turned and not any(problem.startswith("rope_parameters=") for problem in (*problems, *gaps)):
        try:
            assert family.describe is not None, "of a wrapper only the text part is described"
            spec = family.describe(family, config)
            problems += [_in_json(problem, config, family) for problem in spec_problems(spec)]
        except NotNative as error:
            gaps += error.problems
        except ConfigError as error:
            problems += error.problems
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            if not (odd := [*_odd_values(config, family)]):
                raise
            problems += odd
    if problems or gaps:
        raise (ConfigError if problems else NotNative)(_of_family(family, [*problems, *gaps]))
    assert spec is not None, "RoPE without a base is a problem"
    return spec


def _odd_values(config: Any, family: Family) -> Iterator[str]:
    """A sentence for each value of another kind than the default of the configuration's class, for each
    that is no number, and for each 0 where it has none. A family computes with its values before they are checked."""
    usual = type(config)()
    for name in sorted(_read(family)):
        value, own = getattr(config, name, None), getattr(usual, name, None)
        kinds = (int | float, list | tuple, str, dict)
        alike = any(isinstance(value, kind) and isinstance(own, kind) for kind in kinds)
        if own is not None and (not alike or value in (math.inf, -math.inf) or value != value):
            yield f"config.json: {name}={shown(value)}: not a value of this setting, which may be {shown(own)}"
        elif is_number(value, 0, 0) and own != 0:
            yield f"config.json: {name}=0: must not be 0"


def _configuration(raw: Mapping[str, Any], family: Family | None) -> Any:
    """transformers' configuration made of config.json's content. An unknown model, which transformers may not know
    either, is only read to be refused, so its values are taken as they are."""
    from transformers import CONFIG_MAPPING

    if family is None:
        return SimpleNamespace(**raw)
    if problems := list(_json_problems(raw, family)):
        raise ConfigError([f"config.json: {problem}" for problem in problems])
    fields_read = _read(family) - {"is_causal"}

    def made(names: Iterable[str]) -> Any:
        # transformers gets a copy, because it fills in the RoPE parameters that it is given.
        return with_original_length(
            CONFIG_MAPPING[raw["model_type"]].from_dict({name: decoded(raw[name]) for name in names})
        )

    names = [name for name in raw if name in fields_read]
    try:
        config = made(names)
    except Exception as error:  # transformers' validation raises several unrelated types
        why = one_line(error)
        if not any(name in why for name in names):
            wrong = [name for name in names if _succeeds(made, [other for other in names if other != name])]
            why += "".join(f"; look at {name}={shown(raw[name])}" for name in wrong[:3])
        raise ConfigError(f"config.json is not a valid configuration ({why})") from error
    if "eos_token_id" in raw:
        config.eos_token_id = raw["eos_token_id"]  # for null some classes put their family's own
    return config


def _succeeds(make: Callable[[list[str]], Any], names: list[str]) -> bool:
    with suppress(Exception):
        make(names)
        return True
    return False


def _json_problems(raw: Mapping[str, Any], family: Family) -> Iterator[str]:
    """A sentence for each wrong value that transformers' classes would use without a check, or before it."""
    nullable = ("num_key_value_heads", "head_dim")
    for field, largest in LARGEST.items():
        name = _JSON_NAMES.get(field, field)
        if name in raw and not (raw[name] is None and name in nullable) and not is_integer(raw[name], 1, largest):
            yield f"{name}={shown(raw[name])}: {size_demanded(field)}"
    for name in ("dtype", "torch_dtype"):
        value = raw.get(name)
        if value is not None and not (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)):
            yield f"{name}={shown(value)}: must be the name of a torch.dtype, such as bfloat16"
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield f"architectures={shown(names)}: must be a list of class names"
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if rope is not None and not isinstance(rope, dict):
            yield f"{name}={shown(rope)}: must be an object"
        elif rope and not ("no_rope" in family.reads and rope.get("rope_theta", 0) is None):
            parts = {name: rope, **{f"{name}.{key}": part for key, part in rope.items() if isinstance(part, dict)}}
            for place, part in parts.items():
                yield from (f"{place}.{problem}" for problem in _not_numbers(part))
                older, kind = part.get("type"), part.get("rope_type")
                if None not in (older, kind) and older != kind and (older, kind) not in _RENAMED:
                    yield f"{place}: type={shown(older)} contradicts rope_type={shown(kind)}; remove the wrong one"
            if len(parts) > 1 and "rope_by_layer" not in family.reads:
                yield f"{name}={shown(rope)}: layers with different RoPE settings are not supported"
    yield from _not_numbers({name: raw[name] for name in raw.keys() & _NUMBERS})


def _not_numbers(values: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(values.keys() & (_ROPE_NUMBERS | _NUMBERS)):
        if isinstance(values[name], bool) or not isinstance(values[name], int | float):
            yield f"{name}={shown(values[name])}: must be a number"
    for name in sorted(values.keys() & _ROPE_OPTIONAL):
        if values[name] is not None and not is_number(values[name], -1e6, 1e6):
            yield f"{name}={shown(values[name])}: must be a number or null"


def _of_family(family: Family | None, problems: list[str]) -> list[str]:
    return [f"{family.architecture}: {problem}" for problem in problems] if family else problems


def _read(family: Family | None) -> frozenset[str]:
    """The fields that a family's code reads."""
    return READ | (family.reads if family else frozenset())


def _known(family: Family | None) -> frozenset[str]:
    """The fields that a family's code reads, and those of which it accepts some values (`Family.implied`)."""
    return _read(family) | (frozenset(family.implied) if family else frozenset())


def _unsupported(config: Any, family: Family | None) -> Iterator[str]:
    """A sentence for each setting that no model here computes, or not the family's. An unknown model's configuration
    may lack fields."""
    reads = family.reads if family else frozenset()
    rope = getattr(config, "rope_parameters", None)
    if hasattr(config, "rope_parameters") and ("no_rope" not in reads or _thetas(rope)):
        yield from _rope_problems(rope, reads)
    if not reads & {"layer_types", "sliding_window"}:
        yield from _window_problems(config)
    elif "layer_types" not in reads:
        yield from _kind_problems(config)
    yield from packing_problems(getattr(config, "quantization_config", None), takes_mxfp4="mxfp4" in reads)
    if "mlp_bias" not in reads and getattr(config, "mlp_bias", False):
        yield "mlp_bias=true is not supported"


def _gaps(config: Any, family: Family | None) -> Iterator[str]:
    """Yield a message for each setting that transformers computes for these models and the native family does not."""
    reads = family.reads if family else frozenset()
    yield from _rope_gaps(getattr(config, "rope_parameters", None), reads)
    if "hidden_act" not in reads and (activation := getattr(config, "hidden_act", "silu")) not in ("silu", "swish"):
        yield f"hidden_act={shown(activation)}: only silu is supported"


def _window_problems(config: Any) -> Iterator[str]:
    layer_types = getattr(config, "layer_types", None) or []
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else {shown(layer_types)}
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        yield f"layer_types: layers of {', '.join(others)} are not supported, only those of full_attention"
    uses_window = getattr(config, "use_sliding_window", None)
    window = getattr(config, "sliding_window", None)  # classes with use_sliding_window drop an unused one
    if "sliding_attention" in kinds or uses_window or (window is not None and uses_window is None):
        yield "an active sliding window is not supported (layer_types, use_sliding_window, sliding_window)"


def _kind_problems(config: Any) -> Iterator[str]:
    """Yield a message if `layer_types` contradicts a model whose layers are all alike."""
    kinds = getattr(config, "layer_types", None) or []
    own = "full_attention" if config.sliding_window is None else "sliding_attention"
    if others := sorted({str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])} - {own}):
        yield f"layer_types: layers of {', '.join(others)}; transformers ignores it, all layers are {own} in this model"


def _thetas(parameters: Any) -> bool:
    """Whether there is a base, for all layers or for each kind of them."""
    if not isinstance(parameters, Mapping):
        return False
    parts = [part for part in parameters.values() if isinstance(part, Mapping)]
    return "rope_theta" in parameters or bool(parts and all("rope_theta" in part for part in parts))


def _rope_problems(parameters: Any, reads: Set[str] = frozenset()) -> Iterator[str]:
    """A sentence for each setting of RoPE that is not computed. reads: the fields that the family reads, and the types
    of RoPE that it takes in addition to those of all; "rope_by_layer": each kind of its layers may have one."""
    if _thetas(parameters) and "rope_by_layer" in reads and "rope_theta" not in parameters:
        for part in parameters.values():
            yield from _rope_problems(part, reads)
            if isinstance(part, Mapping) and not part.get("truncate", True):
                yield "rope_parameters: truncate=false of a kind of layers; transformers ignores it there"
        return
    kind = parameters.get("rope_type", "default") if _thetas(parameters) else None
    if not isinstance(kind, str) or kind not in ROPE_READ:
        yield _other_rope(parameters, reads)
        return
    if "partial_rotary_factor" not in reads and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor: only the whole head may be rotated"
    for name in sorted(parameters.keys() - ROPE_READ[kind] - ROPE_WITHOUT_EFFECT - reads):
        if parameters[name] not in (None, False, 1):
            yield f"rope_parameters.{name}={shown(parameters[name])}: RoPE of type {kind} has none; check rope_type"


def _rope_gaps(parameters: Any, reads: Set[str]) -> Iterator[str]:
    """Yield a message for each type of RoPE that transformers has and the family lacks. reads: see `_rope_problems`."""
    if not _thetas(parameters):
        return
    if "rope_by_layer" in reads and "rope_theta" not in parameters:
        for part in parameters.values():
            yield from _rope_gaps(part, reads)
    elif parameters.get("rope_type", "default") in [kind for kind in ROPE_READ if kind not in _rope_types(reads)]:
        yield _other_rope(parameters, reads)


def _rope_types(reads: Set[str]) -> list[str]:
    return [kind for kind in ROPE_READ if kind in ("default", "linear", "llama3", "yarn") or kind in reads]


def _other_rope(parameters: Any, reads: Set[str]) -> str:
    *kinds, last = _rope_types(reads)
    return f"rope_parameters={shown(parameters)}: supported are {', '.join(kinds)} and {last} scaling"


def _family(config: Any) -> Family:
    """The family of the model type, which alone counts for transformers. Raises ConfigError for class names that
    contradict it, since they leave open what the weights are."""
    of_type = family_of_type(config.model_type)
    for architecture in getattr(config, "architectures", None) or ():
        if get_family(architecture) is not of_type:
            raise ConfigError(
                f"architectures={shown(architecture)} contradicts model_type={config.model_type}, which is "
                f"{of_type.architecture}; correct the one that is wrong"
            )
    return of_type


def _in_json(problem: str, config: Any, family: Family) -> str:
    """A sentence of `spec_problems` with config.json's name of the field, or with the fields that have its value."""
    name, equals, rest = problem.partition("=")
    value = rest.partition(":")[0]
    name = _JSON_NAMES.get(name, name)
    if name == "head_dim" and hasattr(config, "hidden_size"):  # most files leave it out
        parts = f"hidden_size={shown(config.hidden_size)}, num_attention_heads={shown(config.num_attention_heads)}"
        return f"config.json: {problem} ({parts})"
    fields = [] if not equals or hasattr(config, name.partition(".")[0]) else sorted(family.reads | READ)
    same = [f"{field}={value}" for field in fields if shown(getattr(config, field, None)) == value]
    for ours, theirs in (("rope.freq_f", "rope.short_f"), ("factors", "factor"), ("rope.", "rope_parameters.")):
        name = name.replace(ours, theirs)
    return f"config.json: {name}{equals}{rest}" + (f" ({', '.join(same)})" if same else "")
