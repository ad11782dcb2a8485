"""The `ModelSpec` of a model that runs by transformers' own module: its sizes are read from how the module attends.

The module is made without weights and computes one sequence of a few tokens on the meta device, where only shapes are
known. What each layer hands to its attention says how many heads there are, how large they are, and what each sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from evalengine.errors import ConfigError
from evalengine.models.describe import longest_context, token_ids
from evalengine.models.file_values import is_integer, one_line, shown
from evalengine.models.hf_module import source
from evalengine.models.hf_module.interfaces import AttentionRecorder, LayerAttention, attach
from evalengine.models.rope import RopeSpec
from evalengine.models.spec import Heads, ModelSpec
from evalengine.models.spec_checks import LARGEST, spec_problems

TOKENS = 5  # of the sequence on the meta device


def spec_of_module(raw: Mapping[str, Any]) -> ModelSpec:
    """The spec of config.json's content. The fields of a native family's arithmetic (RoPE, norms, biases) are neutral:
    the module has its own.

    Raises `ConfigError`, by name, for what the module keeps or computes that a row's bits could depend on.
    """
    text = source.text_of(raw)
    config = source.configuration(text)
    model = source.class_of(config)
    longest = longest_context(config) if hasattr(config, "max_position_embeddings") else None
    if not is_integer(longest, 2, LARGEST["max_position_embeddings"]):
        raise ConfigError(f"{model.__name__}: max_position_embeddings={shown(longest)}: must be a number of tokens")
    assert isinstance(longest, int)
    layers = layers_of(source.without_weights(text), longest)
    if problems := [f"{model.__name__}: {problem}" for problem in _layer_problems(layers, config.num_hidden_layers)]:
        raise ConfigError(problems)
    inner = getattr(config, "intermediate_size", None)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    heads = [Heads(layer.heads, layer.kv_heads, max(layer.head_dim, layer.value_dim)) for layer in layers]
    largest = max(heads, key=lambda kind: (kind.size, kind.keys, kind.queries))
    blocks = tuple(
        layer.block if kind == largest else replace(layer.block, heads=kind)
        for layer, kind in zip(layers, heads, strict=True)
    )
    spec = ModelSpec(
        architecture=model.__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=inner if isinstance(inner, int) else 4 * config.hidden_size,
        num_layers=len(layers),
        num_heads=largest.queries,
        num_kv_heads=largest.keys,
        head_dim=largest.size,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=10000.0),
        max_position_embeddings=longest,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        attention_bias=False,
        attention_output_bias=False,
        qk_norm=False,
        dtype=getattr(torch, dtype, None) if isinstance(dtype, str) else None,  # type: ignore[arg-type]
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        blocks=blocks[:1] if len(set(blocks)) == 1 else blocks,
        module=text,
    )
    if problems := spec_problems(spec):
        raise ConfigError([f"{model.__name__}: {problem}" for problem in problems])
    return spec


def layers_of(module: PreTrainedModel, longest: int) -> list[LayerAttention]:
    """How each layer of a module on the meta device attends."""
    name, recorder = type(module).__name__, AttentionRecorder(longest)
    attach(module, recorder)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        _, base = base_of(module)
        with source.quiet(), torch.inference_mode():
            base(
                input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True
            )
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # whatever a module raises that cannot run so
        what = "its layers cannot be followed without weights and their own cache"
        raise ConfigError(f"{name}: {what} ({one_line(error)})") from error
    return recorder.layers


def base_of(module: PreTrainedModel) -> tuple[str, nn.Module]:
    """The part of the module that makes hidden states, and the attribute that holds it. Raises `ConfigError` if there
    is none that takes positions."""
    for name in (module.base_model_prefix, "model", "transformer"):
        base = module._modules.get(name)
        if base is not None:
            if "position_ids" not in inspect.signature(base.forward).parameters:
                raise ConfigError("it takes no positions, so sequences cannot share a batch")
            return name, base
    raise ConfigError("it has no part that makes hidden states")


def _layer_problems(layers: list[LayerAttention], count: int) -> Iterator[str]:
    numbers = [layer.number for layer in layers]
    if numbers != list(range(count)):
        yield (
            f"its {count} layers do not attend once each through transformers' AttentionInterface, in their order "
            f"(attended: {shown(numbers)})"
        )
