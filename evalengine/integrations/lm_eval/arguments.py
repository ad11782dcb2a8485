"""Reads `--model_args`: names of this package's configuration, and names of lm-eval's hf model for the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from evalengine.config.check import name_of_path, numerics_problems, run_problems
from evalengine.config.schema import CacheConfig, Config, EngineConfig, ModelConfig
from evalengine.errors import ConfigError, near
from evalengine.util.validation import integer, read_as, shown

DEFAULT_MAX_GEN_TOKS = 256  # as of lm-eval's hf and vllm models
ENGINE = tuple(item.name for item in fields(EngineConfig))
_SAME = ("revision", "tokenizer", "load_format", "generation_config", "implementation")  # as in `ModelConfig`
MODEL = {"pretrained": "path", "peft": "adapter", **{name: name for name in _SAME}}
RUN = ("batch_invariant", "numerics", "seed", "chat_template_date", "output_dir")
OWN = ("add_bos_token", "enable_thinking", "think_end_token", "max_gen_toks")
CACHE = {"cache": "path", "cache.audit": "audit"}
IGNORED = ("batch_size", "max_batch_size")  # lm-eval always passes batch_size; no result depends on either
KNOWN = (*MODEL, "name", *RUN, *OWN, *CACHE, *ENGINE, *IGNORED)
ELSEWHERE = {  # an argument of lm-eval's other models -> its name here; None: it has no use here
    "max_length": "max_model_len",
    "model": "pretrained",
    "path": "pretrained",
    "trust_remote_code": None,
}
_FLAGS = ("batch_invariant", "add_bos_token", "enable_thinking")
_PATHS = ("output_dir", "cache")
_TEXTS = (*MODEL, *_PATHS, "name", "numerics", "chat_template_date", "dtype", "device", "attention_backend")


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of a model of lm-eval. `config` selects no tasks: lm-eval does."""

    config: Config
    output_dir: str | None = None  # None: the folder where lm-eval writes, if it is known
    add_bos_token: bool | None = None  # None: the tokenizer's default
    enable_thinking: bool | None = None  # None: the chat template gets no value
    think_end_token: str | int | None = None
    max_gen_toks: int = DEFAULT_MAX_GEN_TOKS  # for tasks that name no length


def read_arguments(given: Mapping[str, Any]) -> tuple[ModelArguments, list[str]]:
    """The arguments, and everything that is wrong with them, a sentence each.

    `resolve_checkpoint` and `settings_problems` check what depends on the model or on this machine.
    """
    problems = [_unknown(name) for name in given if name not in KNOWN]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in KNOWN or name in IGNORED or value in (None, "None", "null"):
            continue
        read, problem = _read(name, value)
        if problem:
            problems.append(problem)
        else:
            values[name] = read
    if "pretrained" not in values:
        problems.append("pretrained: names no model; give a folder, a Hub id or a .gguf file")
    config = Config(
        model=_model(values),
        engine=EngineConfig(**{name: values[name] for name in ENGINE if name in values}),
        cache=CacheConfig(**{field: values[name] for name, field in CACHE.items() if name in values}),
        **{name: values[name] for name in RUN if name in values},
    )
    own = {name: values[name] for name in (*OWN, "output_dir") if name in values}
    arguments = ModelArguments(config, **own)
    try:
        right = read_as(Config, config, strict=True)
        problems += [*run_problems(right), *numerics_problems(right.batch_invariant, right.numerics)]
    except ConfigError as error:
        problems += error.problems
    return arguments, [*problems, *_own_problems(arguments)]


def ignored_batch_size(batch_size: Any) -> bool:
    """Whether the user set a batch size that is ignored: lm-eval passes 1 by default."""
    return batch_size is not None and str(batch_size) != "1" and not str(batch_size).startswith("auto")


def with_device(given: Mapping[str, Any], device: Any, has_cuda: bool) -> dict[str, Any]:
    """The arguments with lm-eval's `--device`. Some versions pass "cuda:0" where the user names no device;
    a machine without CUDA ignores that, as lm-eval's hf model does."""
    if device is None or (str(device).startswith("cuda") and not has_cuda):
        return dict(given)
    return {**given, "device": str(device)}


def _unknown(name: str) -> str:
    if name in ELSEWHERE:
        meant = ELSEWHERE[name]
        return f"{name}: no such model argument; " + (f"it is called {meant} here" if meant else "leave it out")
    return f"{name}: no such model argument; {near(name, sorted({*KNOWN} - {*IGNORED}))}"


def _read(name: str, value: Any) -> tuple[Any, str]:
    """(the value, what is wrong with it or ""). lm-eval has parsed the value: a folder `2024` has become an integer."""
    if name in _FLAGS and not isinstance(value, bool):
        return None, f"{name}={shown(value)}: must be True or False"
    if name == "think_end_token":
        return (int(value), "") if str(value).isdigit() else (str(value), "")
    if name in _TEXTS:
        return str(value), ""
    if name == "seed" and integer(value) is None:
        return None, f"seed={shown(value)}: must be an integer"
    return value, ""


def _model(values: Mapping[str, Any]) -> ModelConfig:
    chosen = {field: values[name] for name, field in MODEL.items() if name in values}
    model = ModelConfig(name=values.get("name", ""), **chosen)
    if model.name or not chosen.get("path"):
        return model
    return replace(model, name=name_of_path(model.path))


def _own_problems(arguments: ModelArguments) -> Iterator[str]:
    most = integer(arguments.max_gen_toks)
    if most is None or most < 1:
        yield f"max_gen_toks={shown(arguments.max_gen_toks)}: must be an integer of at least 1"
    if arguments.enable_thinking and arguments.think_end_token is None:
        yield "enable_thinking=True: say where the thinking ends, as in think_end_token=</think>"
