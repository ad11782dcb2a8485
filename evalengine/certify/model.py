"""The model that is certified: a checkpoint, or the shape of a known model with seeded dummy weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.config.schema import ModelConfig
from evalengine.errors import ConfigError
from evalengine.util.plain_files import read_yaml

if TYPE_CHECKING:
    from evalengine.engine.load.loader import Checkpoint

SHAPE = "shape:"


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Name -> the `config.json` of a known model."""
    with as_file(files("evalengine.assets") / "shapes.yaml") as path:
        known: dict[str, dict[str, Any]] = read_yaml(path)
    return known


def open_checkpoint(model: ModelConfig, num_layers: int | None = None) -> Checkpoint:
    """Open a run's `model.path`, or `shape:<name>` (`shapes`) cut to `num_layers` if given.

    Raises: ConfigError for an unknown shape, a depth that is not the shape's to cut, or a model that is not found.
    """
    from evalengine.engine.load.loader import resolve_checkpoint  # torch is not needed to list the shapes

    if not model.path.startswith(SHAPE):
        if num_layers is not None:
            raise ConfigError(f"--layers={num_layers}: only a shape's depth can be cut; {model.path} is none")
        return resolve_checkpoint(model)
    name = model.path.removeprefix(SHAPE)
    if name not in shapes():
        raise ConfigError(
            f"model.path={model.path}: no such shape; there are {', '.join(SHAPE + known for known in shapes())}"
        )
    config = dict(shapes()[name])
    depth = config["num_hidden_layers"]
    if num_layers is not None and not 1 <= num_layers <= depth:
        raise ConfigError(f"--layers={num_layers}: must be in 1 ... {depth} for {model.path}")
    config["num_hidden_layers"] = num_layers = num_layers or depth
    if "layer_types" in config:
        config["layer_types"] = _consecutive(config["layer_types"], num_layers)
    if "full_attention_interval" in config:
        config["full_attention_interval"] = min(config["full_attention_interval"], num_layers)
    with tempfile.TemporaryDirectory() as folder:  # With dummy weights, nothing is read from the folder later.
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return resolve_checkpoint(ModelConfig(name=name, path=folder, load_format="dummy"))


def _consecutive(kinds: list[str], count: int) -> list[str]:
    """Return the first `count` layers, or the `count` layers up to the first attention if that comes later: a model
    without any attention is not supported."""
    first = next(i for i, kind in enumerate(kinds) if kind.endswith("attention"))
    start = max(0, first + 1 - count)
    return kinds[start : start + count]
