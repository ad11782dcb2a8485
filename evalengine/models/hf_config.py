"""Translates a Hugging Face model's config.json into a `ModelSpec`.

Settings that the engine cannot compute faithfully (an active sliding window, an unknown RoPE type, packed quantised
weights) are refused here, all at once. transformers' configuration classes supply the defaults and RoPE's old
spellings. They are given only the fields that `config_fields` says are read: any other would become an attribute of
theirs, and `num_labels` of a billion a dictionary of a billion labels. Fields that the classes use before they check
them are checked here first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from evalengine.errors import ConfigError
from evalengine.models.config_fields import (
    CHECKED_BY_CLASS,
    HONOURED,
    ROPE_READ,
    ROPE_WITHOUT_EFFECT,
    contradicting_fields,
    refused_fields,
)
from evalengine.models.file_values import is_integer, one_line, shown
from evalengine.models.registry import find_class_for_type, get_model_class, model_class_for_type
from evalengine.models.spec import ModelSpec, RopeSpec
from evalengine.models.spec_checks import LARGEST, spec_problems

if TYPE_CHECKING:
    from evalengine.models.decoder import DecoderForCausalLM

_ROPE_NUMBERS = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# `ModelSpec`'s name -> config.json's name, where they differ.
_JSON_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}


def spec_from_json(raw: Mapping[str, Any]) -> ModelSpec:
    """The `ModelSpec` of config.json's content, as transformers would understand it.

    Raises `ConfigError` that lists everything that is not supported or cannot be meant, also the model itself.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        is_a = f"its model_type is {shown(model_type)}" if "model_type" in raw else "config.json has no model_type"
        raise ConfigError(f"{is_a}; it is not a Hugging Face model's configuration")
    model = find_class_for_type(model_type)
    problems = list(_unsupported_json(raw)) if model else []  # those of another model would only hide that it is one
    try:
        spec = from_hf(_configuration(raw, is_known=model is not None))
    except ConfigError as error:
        raise ConfigError([*error.problems, *_of_class(model, problems)]) from error
    if problems := [*problems, *contradicting_fields(raw, spec)]:
        raise ConfigError(_of_class(model, problems))
    return spec


def from_hf(config: Any) -> ModelSpec:
    """The `ModelSpec` of a transformers `PretrainedConfig`; for an unknown model type, an object with config.json's
    values will do.

    Raises `ConfigError` that lists everything that is not supported, also the model itself.
    """
    problems = list(_unsupported(config))
    try:
        model = _model_class(config)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    spec = _spec(config, model) if _has_theta(config.rope_parameters) else None
    if spec is not None:  # an unknown RoPE type is among the problems already
        problems += [_in_json(problem) for problem in spec_problems(spec) if not problem.startswith("rope.type")]
    if problems:
        raise ConfigError(_of_class(model, problems))
    assert spec is not None, "RoPE without a base is a problem"
    return spec


def token_ids(value: Any) -> tuple[Any, ...]:
    """A configuration's `eos_token_id`, which may be absent, one id or several, as a tuple; the ids are not checked."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(dict.fromkeys(ids)) if all(is_integer(i) for i in ids) else ids


def _configuration(raw: Mapping[str, Any], is_known: bool) -> Any:
    """transformers' configuration made of config.json's content. An unknown model, which transformers may not know
    either, is only read to be refused, so its values are taken as they are."""
    from transformers import CONFIG_MAPPING

    if not is_known:
        return SimpleNamespace(**raw)
    if problems := list(_json_problems(raw)):
        raise ConfigError([f"config.json: {problem}" for problem in problems])
    fields_read = HONOURED | CHECKED_BY_CLASS
    try:
        # transformers gets a copy, because it fills in the RoPE parameters that it is given.
        return CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy({k: raw[k] for k in raw.keys() & fields_read}))
    except Exception as error:  # transformers' validation raises several unrelated types
        raise ConfigError(f"config.json is not a valid configuration ({one_line(error)})") from error


def _json_problems(raw: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each wrong value that transformers' classes would use without a check, or before it."""
    nullable = ("num_key_value_heads", "head_dim")
    for name, largest in ((_JSON_NAMES.get(name, name), largest) for name, largest in LARGEST.items()):
        if name in raw and not (raw[name] is None and name in nullable) and not is_integer(raw[name], 1, largest):
            yield f"{name}={shown(raw[name])}: must be an integer from 1 to {largest}"
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
        elif rope:
            yield from (f"{name}.{problem}" for problem in _not_numbers(rope))
            if any(isinstance(value, dict) for value in rope.values()):
                yield f"{name}={shown(rope)}: layers with a RoPE of their own are not supported"
    yield from _not_numbers({name: value for name, value in raw.items() if name in ("rope_theta", "rms_norm_eps")})


def _not_numbers(values: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(values.keys() & (_ROPE_NUMBERS | {"rms_norm_eps"})):
        if isinstance(values[name], bool) or not isinstance(values[name], int | float):
            yield f"{name}={shown(values[name])}: must be a number"


def _of_class(model: type[DecoderForCausalLM] | None, problems: list[str]) -> list[str]:
    return [f"{model.__name__}: {problem}" for problem in problems] if model else problems


def _unsupported_json(raw: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each unsupported value of a field that transformers' code for these models asks for, though their
    classes do not declare it, and for each that another family's code computes with."""
    if raw.get("is_causal", True) is not True:
        yield f"is_causal={shown(raw['is_causal'])}: attention is causal here; other attention is not supported"
    yield from refused_fields(raw)


def _unsupported(config: Any) -> Iterator[str]:
    """A sentence for each setting that no model here computes. An unknown model's configuration may lack fields."""
    if hasattr(config, "rope_parameters"):
        yield from _rope_problems(config.rope_parameters)
    layer_types = getattr(config, "layer_types", None) or []
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else {shown(layer_types)}
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        yield f"layer_types: layers of {', '.join(others)} are not supported, only those of full_attention"
    uses_window = getattr(config, "use_sliding_window", None)
    window = getattr(config, "sliding_window", None)  # classes with use_sliding_window drop an unused one
    if "sliding_attention" in kinds or uses_window or (window is not None and uses_window is None):
        yield "an active sliding window is not supported (layer_types, use_sliding_window, sliding_window)"
    if getattr(config, "quantization_config", None) is not None:
        yield "quantization_config: packed weights are not supported; use the unquantised checkpoint"
    if (activation := getattr(config, "hidden_act", "silu")) != "silu":
        yield f"hidden_act={shown(activation)}: only silu is supported"
    if getattr(config, "mlp_bias", False):
        yield "mlp_bias=true is not supported"


def _has_theta(parameters: Any) -> bool:
    return isinstance(parameters, Mapping) and "rope_theta" in parameters


def _rope_problems(parameters: Any) -> Iterator[str]:
    if not _has_theta(parameters) or parameters.get("rope_type", "default") not in ("default", "linear", "llama3"):
        yield f"rope_parameters={shown(parameters)}: supported are default, linear and llama3 scaling"
        return
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor: only the whole head may be rotated"
    kind = parameters.get("rope_type", "default")
    for name in sorted(parameters.keys() - ROPE_READ[kind] - ROPE_WITHOUT_EFFECT):
        if parameters[name] not in (None, False, 1):
            yield f"rope_parameters.{name}={shown(parameters[name])}: RoPE of type {kind} ignores it; remove it"


def _model_class(config: Any) -> type[DecoderForCausalLM]:
    """The class of the model type, which alone counts for transformers. Raises ConfigError for class names that
    contradict it, since they leave open what the weights are."""
    of_type = model_class_for_type(config.model_type)
    for architecture in getattr(config, "architectures", None) or ():
        if get_model_class(architecture) is not of_type:
            raise ConfigError(
                f"architectures={shown(architecture)} contradicts model_type={config.model_type}, which is "
                f"{of_type.__name__}; correct the one that is wrong"
            )
    return of_type


def _spec(config: Any, model: type[DecoderForCausalLM]) -> ModelSpec:
    qkv_bias, output_bias = model.attention_biases(config)
    heads = config.num_attention_heads
    return ModelSpec(
        architecture=model.__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=qkv_bias,
        attention_output_bias=output_bias,
        qk_norm=model.qk_norm,
        dtype=getattr(config, "dtype", None) or torch.float32,
        bos_token_id=config.bos_token_id,
        eos_token_ids=token_ids(config.eos_token_id),
    )


def _rope(parameters: Mapping[str, Any]) -> RopeSpec:
    # transformers 5 keeps theta in rope_parameters and has no `rope_theta` attribute.
    kind = parameters.get("rope_type", "default")
    scaling = {
        name: parameters[name]
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if kind != "default" and name in parameters
    }
    theta = parameters["rope_theta"]
    return RopeSpec(theta=float(theta) if is_integer(theta) else theta, type=kind, **scaling)


def _in_json(problem: str) -> str:
    """A sentence of `spec_problems` with config.json's name of the field."""
    name, equals, rest = problem.partition("=")
    return f"config.json: {_JSON_NAMES.get(name, name.replace('rope.', 'rope_parameters.'))}{equals}{rest}"
