"""Which class of transformers a checkpoint is of, and its configuration, as one text in the `ModelSpec`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.utils import logging as transformers_logging

from evalengine.errors import ConfigError
from evalengine.models.describe import with_original_length
from evalengine.models.file_values import decoded, is_integer, one_line, plain, shown
from evalengine.models.hf_module.interfaces import NAME
from evalengine.models.spec_checks import LARGEST

# Fields of a config.json that say nothing of what the module computes, or that another file has the last word on; one
# that begins with "_" is transformers' own. `num_labels` of a billion would be a dictionary of a billion labels.
_SAYING_NOTHING = """
    architectures auto_map dtype torch_dtype transformers_version num_labels id2label label2id problem_type use_cache
    output_attentions output_hidden_states output_router_logits return_dict bos_token_id eos_token_id name_or_path
    attn_implementation experts_implementation
"""
_LEFT_OUT = frozenset(_SAYING_NOTHING.split())
# transformers' private names, all in this file and seen at work in 5.24: what to do in a version without one.
FIXES = {
    "_from_config": "make the module by AutoModelForCausalLM.from_config",
    "_is_stateful": "ask the configuration for layers with a recurrent state",
    "_can_set_attn_implementation": "ask whether the module's source calls ALL_ATTENTION_FUNCTIONS",
    "_can_set_experts_implementation": "ask whether the module's experts are of the experts interface",
}


def text_of(raw: Mapping[str, Any]) -> str:
    """The class, its configuration with all defaults, and the version of transformers, whose code computes.

    Raises `ConfigError` for a class that transformers does not have, and for what can be refused by the configuration.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model_type={shown(model_type)}: transformers {transformers.__version__} has no such model")
    if raw.get("quantization_config") is not None:
        raise ConfigError("quantization_config: packed weights are not supported; use the unquantised checkpoint")
    public = {name: value for name, value in raw.items() if name not in _LEFT_OUT and not name.startswith("_")}
    config = _configuration(model_type, public)
    model = _class(config)
    named = raw.get("architectures") or [model.__name__]
    if named != [model.__name__]:
        raise ConfigError(
            f"architectures={shown(named)}: for model_type={plain(model_type)}, only {model.__name__} runs"
        )
    if problems := list(_problems(config, model)):
        raise ConfigError([f"{model.__name__}: {problem}" for problem in problems])
    values = json.loads(config.to_json_string(use_diff=False))
    values = {name: value for name, value in values.items() if name not in _LEFT_OUT and not name.startswith("_")}
    source = {"class": model.__name__, "config": values, "transformers": transformers.__version__}
    return json.dumps(source, sort_keys=True)


def configuration(text: str) -> Any:
    """transformers' configuration of `text_of`'s text."""
    values = json.loads(text)["config"]
    return _configuration(values["model_type"], values)


def class_of(config: Any) -> type[PreTrainedModel]:
    return _class(config)


def implementations(model: type[PreTrainedModel]) -> dict[str, Any]:
    """The arguments with which transformers makes a module that attends, and adds its experts, by our functions."""
    takes_experts = model._can_set_experts_implementation()
    return {
        "attn_implementation": NAME,
        **({"experts_implementation": NAME} if takes_experts else {}),
    }


def made(model: type[PreTrainedModel], config: Any, dtype: torch.dtype, chosen: Mapping[str, Any]) -> Any:
    """The module with random weights, on the current device; `chosen` as of `implementations`."""
    return model._from_config(config, dtype=dtype, **chosen)


@lru_cache(maxsize=4)
def without_weights(text: str) -> PreTrainedModel:
    """The module on the meta device. Its experts are multiplied in a form that does not look at what they are given."""
    config = configuration(text)
    model = _class(config)
    chosen = implementations(model)
    if "experts_implementation" in chosen:
        chosen["experts_implementation"] = "batched_mm"
    try:
        with quiet(), torch.device("meta"):
            return made(model, config, torch.bfloat16, chosen).eval()
    except Exception as error:  # transformers' constructors raise whatever a wrong value makes them
        raise ConfigError(f"{model.__name__}: transformers cannot make it ({one_line(error)})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own messages and progress bars: what matters of them is raised."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _configuration(model_type: str, values: Mapping[str, Any]) -> Any:
    try:
        with quiet():
            return with_original_length(CONFIG_MAPPING[model_type].from_dict(decoded(dict(values))))
    except Exception as error:  # transformers' validation raises several unrelated types
        raise ConfigError(f"config.json is not a valid configuration ({one_line(error)})") from error


def _class(config: Any) -> type[PreTrainedModel]:
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    model: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    if model is None:
        raise ConfigError(f"model_type={plain(config.model_type)}: transformers has no decoder of texts for it")
    return model


def _problems(config: Any, model: type[PreTrainedModel]) -> Iterator[str]:
    """A sentence for each thing by which a row would depend on more than the keys and values before it."""
    if not is_integer(getattr(config, "num_hidden_layers", None), 1, LARGEST["num_layers"]):
        yield f"num_hidden_layers={shown(getattr(config, 'num_hidden_layers', None))}: must be a number of layers"
    if getattr(config, "is_encoder_decoder", False):
        yield "only decoders are supported"
    kinds = getattr(config, "layer_types", None) or ()
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if others:
        yield f"layer_types: layers of {', '.join(others)} are not supported, only those of attention over a KV cache"
    elif model._is_stateful:
        yield "it keeps a recurrent state, which is not supported"
    elif not model._can_set_attn_implementation():
        yield "its attention does not go through transformers' AttentionInterface"
    for kind in sorted(set(_rope_types(getattr(config, "rope_parameters", None))) & {"dynamic", "longrope"}):
        yield f"rope_parameters: RoPE of type {kind} depends on the longest row of a batch in transformers' module"


def _rope_types(parameters: Any) -> Iterator[str]:
    """The types of RoPE, of all layers or of each kind of them."""
    if isinstance(parameters, Mapping):
        yield str(parameters.get("rope_type", "default"))
        for part in parameters.values():
            yield from _rope_types(part)
