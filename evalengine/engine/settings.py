"""`EngineConfig`, resolved for one model and one machine; everything that cannot be honoured is found here, at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from evalengine.config import EngineConfig, Numerics, engine_problems, resolve_numerics
from evalengine.errors import ConfigError
from evalengine.layers import NATIVE_IS_ABSENT
from evalengine.models.config import ModelSpec

DEFAULT_BLOCK_SIZE = 64
LARGEST_USEFUL_PAGE = 256  # tokens: the page size that flash-attn asks for


@dataclass(frozen=True)
class Settings:
    """What `auto` and null stand for."""

    device: torch.device
    numerics: Numerics
    dtype: torch.dtype  # of weights and KV
    max_model_len: int
    block_size: int
    num_threads: int


def resolve_settings(config: EngineConfig, batch_invariant: bool, numerics: str, spec: ModelSpec) -> Settings:
    """Raises one ConfigError with everything `settings_problems` finds."""
    if problems := list(settings_problems(config, batch_invariant, numerics, spec)):
        raise ConfigError(problems)
    device = torch.device(_device_name(config.device))
    return Settings(
        device=device,
        numerics=resolve_numerics(batch_invariant, numerics, device.type),
        dtype=spec.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        max_model_len=config.max_model_len or spec.max_position_embeddings,
        block_size=DEFAULT_BLOCK_SIZE if config.block_size == "auto" else int(config.block_size),
        num_threads=config.num_threads or torch.get_num_threads(),
    )


def settings_problems(
    config: EngineConfig, batch_invariant: bool, numerics: str, spec: ModelSpec | None
) -> Iterator[str]:
    """What is wrong, a sentence each. `spec` None: the model was not found, so only what does not depend on it."""
    problems = list(engine_problems(config))
    yield from problems
    if problems:
        return
    device = _device_name(config.device)
    if device.startswith("cuda"):
        yield from _cuda_problems(device)
    try:
        level = resolve_numerics(batch_invariant, numerics, device.partition(":")[0])
    except ConfigError as error:
        yield from error.problems
    else:
        if level == "native":
            yield NATIVE_IS_ABSENT
    if spec is not None:
        yield from _length_problems(config, spec.max_position_embeddings)


def _device_name(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _cuda_problems(device: str) -> Iterator[str]:
    if not torch.cuda.is_available():
        yield f"engine.device={device}: this machine has no usable CUDA device; use engine.device=cpu"
    elif (torch.device(device).index or 0) >= torch.cuda.device_count():
        yield f"engine.device={device}: this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0"


def _length_problems(config: EngineConfig, limit: int) -> Iterator[str]:
    longest = limit if config.max_model_len is None else config.max_model_len
    if not 1 < longest <= limit:
        yield f"engine.max_model_len={longest}: must lie in 2 ... {limit} (the model's limit)"
        return
    if config.block_size != "auto" and config.block_size > max(longest, LARGEST_USEFUL_PAGE):
        yield (
            f"engine.block_size={config.block_size}: a page longer than any sequence (max_model_len={longest}) only "
            "wastes memory; leave it at auto, or take 16 to 256"
        )
