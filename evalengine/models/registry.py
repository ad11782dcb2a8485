"""The models that the engine knows, by the class name in a checkpoint's `architectures`.

To add one, write `evalengine/models/<name>.py` with a class decorated by `register_model(<HF class name>)`, and import
that file in `evalengine/models/__init__.py`. A decoder of the Llama shape subclasses `DecoderForCausalLM` and states
where it differs (`llama.py`, `qwen3.py`); another shape is any module with that class's methods, made of
`evalengine.layers`, whose parameters are named as in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from evalengine.errors import ConfigError
from evalengine.models.file_values import plain

if TYPE_CHECKING:
    from evalengine.models.decoder import DecoderForCausalLM

MODEL_REGISTRY: dict[str, type[DecoderForCausalLM]] = {}


def register_model(
    architecture: str,
) -> Callable[[type[DecoderForCausalLM]], type[DecoderForCausalLM]]:
    """Class decorator: makes the class the implementation of `architecture`, which must be the class's name."""

    def register(cls: type[DecoderForCausalLM]) -> type[DecoderForCausalLM]:
        assert cls.__name__ == architecture and architecture not in MODEL_REGISTRY
        MODEL_REGISTRY[architecture] = cls
        return cls

    return register


def get_model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class registered for a Hugging Face class name; `ConfigError` lists the supported ones."""
    if architecture not in MODEL_REGISTRY:
        raise ConfigError(f"model architecture {plain(architecture)} is not supported; supported: {_supported()}")
    return MODEL_REGISTRY[architecture]


def model_class_for_type(model_type: str) -> type[DecoderForCausalLM]:
    """The class for a config's `model_type` or a GGUF file's `general.architecture`. Raises ConfigError for another."""
    if (cls := find_class_for_type(model_type)) is None:
        raise ConfigError(f"model type {plain(model_type)} is not supported; supported: {_supported()}")
    return cls


def find_class_for_type(model_type: str) -> type[DecoderForCausalLM] | None:
    """`model_class_for_type`; None for an unknown type."""
    return next((cls for cls in MODEL_REGISTRY.values() if cls.model_type == model_type), None)


def _supported() -> str:
    return ", ".join(f"{name} ({cls.model_type})" for name, cls in sorted(MODEL_REGISTRY.items()))
