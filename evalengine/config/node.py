"""Turns the values that Hydra composed into a `Config`: the schema, and settings that stand for others."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from evalengine.config.schema import Config
from evalengine.errors import ConfigError


def to_config(data: dict[str, Any], keys: Set[str]) -> Config:
    """A composed configuration as plain values -> the run's. keys: the settings that the user's overrides name.

    Raises `ConfigError` for a model without a path.
    """
    complete_model(data["model"], keys)
    for name, task in data["tasks"].items():
        _complete_dataset(task["dataset"], data["task"]["dataset"], f"tasks.{name}.dataset", keys)
        data["tasks"][name] = _apply(data["task"], task, f"tasks.{name}", keys)
    config: Config = freeze(Config, data)
    return config


def complete_model(model: dict[str, Any], keys: Set[str]) -> None:
    """Completes the model's settings: a path given by the user is the only one tried, and its last part names a model
    without a name."""
    if model["path"] in ("", "???"):
        raise ConfigError("model.path: names no weights; give a folder, a Hub id or a .gguf file")
    if "model.path" in keys:
        model["alternatives"] = model["alternatives"] if "model.alternatives" in keys else []
        model["revision"] = model["revision"] if "model.revision" in keys else None
    if "model.path" in keys and not {"model", "model.name"} & keys:  # the default model has another name
        last = re.split(r"[/\\:]", model["path"].rstrip("/\\"))[-1]
        model["name"] = (Path(model["path"]).resolve().name if last in ("", ".", "..") else last).removesuffix(".gguf")


def _complete_dataset(own: dict[str, Any], shared: dict[str, Any], where: str, keys: Set[str]) -> None:
    """Clears the shipped configuration and commit if the user names another dataset, for which they mean nothing."""
    set_names = {name for name in shared if shared[name] or f"{where}.{name}" in keys}
    if "path" in set_names:
        own.update(dict.fromkeys({"name", "revision"} - set_names))


def _apply(shared: dict[str, Any], own: dict[str, Any], where: str, keys: Set[str]) -> dict[str, Any]:
    """`own` with the set fields of `shared` (the `task:` node), except those that `tasks.<name>.` overrides named."""
    merged = dict(own)
    for name, value in shared.items():
        path = f"{where}.{name}"
        if path in keys or value is None:
            continue
        if isinstance(value, dict):
            merged[name] = _apply(value, own.get(name, {}), path, keys)
        else:
            merged[name] = value
    return merged


@lru_cache(None)
def mutable(kind: Any) -> Any:
    """The dataclass, not frozen, nested ones included: OmegaConf makes read-only nodes of frozen dataclasses, and a
    read-only schema accepts no value."""
    if get_origin(kind) is dict:
        return dict[str, mutable(get_args(kind)[1])]  # type: ignore[misc]
    if not is_dataclass(kind):
        return kind
    hints = get_type_hints(kind)
    members: list[tuple[str, Any, Any]] = []
    for item in fields(kind):
        factory: Any = item.default_factory
        default = field(default=item.default) if factory is MISSING else field(default_factory=mutable(factory))
        members.append((item.name, mutable(hints[item.name]), default))
    assert isinstance(kind, type)
    return make_dataclass(kind.__name__, members)


def freeze(kind: Any, data: Any) -> Any:
    """The dataclass `kind` made of plain values, nested ones included."""
    if get_origin(kind) is dict:
        return {name: freeze(get_args(kind)[1], value) for name, value in data.items()}
    if not is_dataclass(kind):
        return data
    hints = get_type_hints(kind)
    return kind(**{name: freeze(hints[name], value) for name, value in data.items()})  # type: ignore[operator]
