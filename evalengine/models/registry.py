"""The model families that the engine knows, by the class name in a checkpoint's `architectures`.

To add one, write `evalengine/models/families/<name>.py`, which registers a `Family`: how its config.json reads as a
`ModelSpec`, and what its weights are called. The decoder and the loader are written once (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evalengine.errors import ConfigError
from evalengine.models.file_values import plain
from evalengine.models.gguf_form import GGUFForm
from evalengine.models.spec import ModelSpec
from evalengine.models.weight_names import WeightNames


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face's.

    describe: transformers' configuration -> its `ModelSpec`; raises `ConfigError` for what it does not compute. None
    for a family that wraps another one, which describes its text part.
    """

    architecture: str  # Hugging Face's class name, key of MODEL_REGISTRY
    model_type: str  # its config.model_type
    describe: Callable[[Family, Any], ModelSpec] | None = None
    # Fields of config.json that it computes, in addition to those that all read; types of RoPE, and "rope_by_layer",
    # likewise.
    reads: frozenset[str] = frozenset()
    weights: WeightNames = field(default_factory=WeightNames)
    gguf: GGUFForm | None = None  # of a family whose GGUF files are read
    wraps: str | None = None  # the model_type of its text part, for a model of texts and images
    # Fields of published files that transformers' code does not read -> the values that describe what it computes.
    implied: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.architecture not in MODEL_REGISTRY and (self.describe is None) == (self.wraps is not None)
        MODEL_REGISTRY[self.architecture] = self


MODEL_REGISTRY: dict[str, Family] = {}


class NotNative(ConfigError):
    """A valid configuration that transformers computes and the native family does not.

    Not raised for fields that transformers ignores or that contradict each other: its module would compute a different
    model.
    """


def get_family(architecture: str) -> Family:
    """The family of a Hugging Face class name; `ConfigError` lists the supported ones."""
    if architecture not in MODEL_REGISTRY:
        raise ConfigError(
            f"model architecture {plain(architecture) or '(empty)'} is not supported; supported: {_supported()}"
        )
    return MODEL_REGISTRY[architecture]


def family_of_type(model_type: str) -> Family:
    """The family of a config's `model_type`. Raises ConfigError for another."""
    if (family := find_family_of_type(model_type)) is None:
        raise ConfigError(no_family(model_type))
    return family


def no_family(model_type: str, why: str = "") -> str:
    """A sentence that a model type has no family. why: what keeps transformers' own module from serving it."""
    other = f" (by transformers' own module: {why})" if why else ""
    return f"model type {plain(model_type) or '(empty)'} is not supported{other}; supported: {_supported()}"


def find_family_of_type(model_type: str) -> Family | None:
    """`family_of_type`; None for an unknown type."""
    return next((family for family in MODEL_REGISTRY.values() if family.model_type == model_type), None)


def family_of_gguf(architecture: str, value: Callable[[str], Any]) -> Family:
    """The family of a GGUF file's `general.architecture`. value: the metadata below it by their keys, which tell
    families of one architecture apart. Raises ConfigError for one whose files are not read."""
    known = [(family, family.gguf) for family in MODEL_REGISTRY.values() if family.gguf is not None]
    plain_one = None
    for family, form in known:
        if form.architecture == architecture:
            if form.when is None:
                plain_one = family
            elif value(form.when):
                return family
    if plain_one is not None:
        return plain_one
    names = ", ".join(f"{family.architecture} ({form.architecture})" for family, form in known)
    raise ConfigError(f"model type {plain(architecture)} is not supported in GGUF files; supported: {names}")


def _supported() -> str:
    return ", ".join(f"{name} ({family.model_type})" for name, family in sorted(MODEL_REGISTRY.items()))
