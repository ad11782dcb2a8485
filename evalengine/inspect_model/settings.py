"""Reads what follows `--model evalengine/` and the `-M` arguments: names of this package's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config, EngineConfig
from evalengine.config.shipped import available
from evalengine.config.words import quoted
from evalengine.errors import ConfigError

OF_THE_MODEL = (
    *("revision", "tokenizer", "load_format", "implementation", "adapter", "adapter_revision", "generation_config"),
    "think_end_token",
)
OF_A_RUN = ("batch_invariant", "numerics", "enable_thinking", "chat_template_args", "chat_template_date")
OF_THE_ENGINE = tuple(item.name for item in fields(EngineConfig))
RECORD = "record"  # a folder for the run that the answers are kept as


def read_settings(model: str, given: Mapping[str, Any]) -> tuple[Config, str | None]:
    """(the configuration, the folder to record in). model: a name of `conf/model/`, a folder, a Hub id or a .gguf file.

    Raises: ConfigError with all that is wrong.
    """
    words = [f"model={model}" if model in available("model") else f"model.path={quoted(model)}"]
    record, problems = None, []
    for name, value in given.items():
        if name == RECORD:
            record = str(value)
        elif name in OF_THE_ENGINE:
            words.append(f"engine.{name}={_written(value)}")
        elif name in OF_THE_MODEL:
            words.append(f"model.{name}={_written(value)}")
        elif name in OF_A_RUN:
            words.append(f"{name}={_written(value)}")
        else:
            known = ", ".join((RECORD, *OF_A_RUN, *OF_THE_MODEL, *OF_THE_ENGINE))
            problems.append(f"-M {name}: no argument of this model; there are {known}")
    if problems:
        raise ConfigError(problems)
    return compose_jobs(words)[0].config, record


def _written(value: Any) -> str:
    """A value as the grammar of settings has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{quoted(str(name))}:{_written(item)}" for name, item in value.items()) + "}"
    return quoted(value) if isinstance(value, str) else str(value)
