"""Settings that stand for others: `task.` for every task's, a model's path for its name, a dataset's for its commit."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from evalengine.config.kinds import MAX_MODEL_NAME
from evalengine.config.schema import Config, DatasetConfig, ModelConfig

T = TypeVar("T")


def completed(config: Config, keys: Set[str]) -> Config:
    """The configuration with what its settings imply. keys: the settings that the user's overrides name."""
    tasks = {}
    for name, own in config.tasks.items():
        dataset = _of_another(own.dataset, config.task.dataset, f"tasks.{name}.dataset", keys)
        tasks[name] = _applied(config.task, replace(own, dataset=dataset), f"tasks.{name}", keys)
    return replace(config, model=complete_model(config.model, keys), tasks=tasks)


def complete_model(model: ModelConfig, keys: Set[str]) -> ModelConfig:
    """A path given by the user is the only one tried, and its last part names a model without a name; an adapter's last
    part follows."""
    if "model.path" in keys:
        alternatives = model.alternatives if "model.alternatives" in keys else []
        revision = model.revision if "model.revision" in keys else None
        named = {"model", "model.name"} & keys  # otherwise the name is the default model's
        name = model.name if named else name_of_path(model.path)
        model = replace(model, alternatives=alternatives, revision=revision, name=name)
    if model.adapter and "model.adapter" in keys and "model.name" not in keys:
        model = replace(model, name=f"{model.name}+{name_of_path(model.adapter)}"[:MAX_MODEL_NAME])
    return model


def name_of_path(path: str) -> str:
    """The name of a model that has none: the last part of its path."""
    last = re.split(r"[/\\:]", path.rstrip("/\\"))[-1]
    return (Path(path).resolve().name if last in ("", ".", "..") else last).removesuffix(".gguf")


def _of_another(own: DatasetConfig, shared: DatasetConfig, where: str, keys: Set[str]) -> DatasetConfig:
    """Without the shipped configuration and commit if the user names another dataset, for which they mean nothing."""
    given = {item.name for item in fields(shared) if getattr(shared, item.name) or f"{where}.{item.name}" in keys}
    cleared: Any = dict.fromkeys({"name", "revision"} - given)
    return replace(own, **cleared) if "path" in given else own


def _applied(shared: T, own: T, where: str, keys: Set[str]) -> T:
    """`own` with the set fields of `shared` (the `task:` node), except those that `tasks.<name>.` overrides named."""
    changes = {}
    for item in fields(shared):  # type: ignore[arg-type]  # both are dataclasses
        value, mine, path = getattr(shared, item.name), getattr(own, item.name), f"{where}.{item.name}"
        if path in keys or value is None:
            continue
        if is_dataclass(value):
            changes[item.name] = _applied(value, mine, path, keys)
        elif str(item.type).startswith("dict"):
            changes[item.name] = mine | {key: text for key, text in value.items() if f"{path}.{key}" not in keys}
        else:
            changes[item.name] = value
    return replace(own, **changes)  # type: ignore[type-var]
