"""Checks the engine's settings as far as no machine is needed for it, and resolves their numerics level."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from evalengine.config.arguments import number, shown
from evalengine.config.schema import MAX_RANKS, EngineConfig, Numerics
from evalengine.config.values import as_typed, choice_problems, size_problems
from evalengine.errors import ConfigError

NUMERICS = ("auto", "native", "exact", "fast")
DTYPES = ("auto", "bfloat16", "float16", "float32")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "sdpa")
CASCADES = ("auto", "always", "off")
MAX_NUM_SEQS = (1 << 16) - 1
MAX_NUM_THREADS = 256  # allowed on smaller machines, too, where a larger one's run may be explained


def resolve_numerics(batch_invariant: bool, numerics: str, device_type: str) -> Numerics:
    """The numerics level of a run on `device_type` ("cpu" | "cuda").

    Raises `ConfigError` where the two settings contradict each other, or the device has no such level.
    """
    if problems := list(numerics_problems(batch_invariant, numerics)):
        raise ConfigError(problems)
    if numerics == "native" and device_type != "cuda":
        raise ConfigError(
            f"numerics=native runs on CUDA only, and this run's device is {device_type}: use numerics=exact or auto"
        )
    if numerics != "auto":
        level: Numerics = numerics  # type: ignore[assignment]  # numerics_problems() checked it
        return level
    if not batch_invariant:
        return "fast"
    return "native" if device_type == "cuda" else "exact"


def numerics_problems(batch_invariant: bool, numerics: str) -> Iterator[str]:
    """Yields what is wrong with the two settings, a sentence each."""
    if not isinstance(batch_invariant, bool):
        yield f"batch_invariant={shown(batch_invariant)}: must be true or false"
        return
    yield from choice_problems("numerics", numerics, NUMERICS)
    if batch_invariant and numerics == "fast":
        yield "batch_invariant=true contradicts numerics=fast: set batch_invariant=false, or numerics=auto"
    if not batch_invariant and numerics in ("exact", "native"):
        yield f"batch_invariant=false contradicts numerics={numerics}: set batch_invariant=true, or numerics=auto"


def engine_problems(engine: EngineConfig) -> Iterator[str]:
    """Yields what is wrong with the engine's settings, a sentence each. `settings_problems` and `memory_problems` check
    what depends on the model or on free memory."""
    yield from choice_problems("engine.dtype", engine.dtype, DTYPES)
    if not isinstance(engine.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", engine.device):
        yield f"engine.device={as_typed(engine.device)}: must be auto, cpu, cuda or cuda:<number>"
    yield from choice_problems("engine.attention_backend", engine.attention_backend, ATTENTION_BACKENDS)
    yield from choice_problems("engine.cascade_attention", engine.cascade_attention, CASCADES)
    for name in ("max_model_len", "num_kv_blocks"):
        if getattr(engine, name) is not None:
            yield from size_problems(f"engine.{name}", getattr(engine, name))
    yield from size_problems("engine.max_num_batched_tokens", engine.max_num_batched_tokens)
    why = " (a decode kernel's grid has a row for each sequence, and CUDA allows no more)"
    yield from size_problems("engine.max_num_seqs", engine.max_num_seqs, MAX_NUM_SEQS, why)
    if engine.num_threads is not None:
        why = f" (this machine has {os.cpu_count()} processors, and OpenMP ends a process that gets no more threads)"
        yield from size_problems(
            "engine.num_threads", engine.num_threads, max(MAX_NUM_THREADS, os.cpu_count() or 1), why
        )
    yield from size_problems("engine.tensor_parallel_size", engine.tensor_parallel_size, MAX_RANKS)
    if not (isinstance(engine.block_size, str) and engine.block_size == "auto"):
        yield from size_problems("engine.block_size", engine.block_size, words="auto or a positive number of tokens")
    fraction = number(engine.kv_cache_memory_fraction)
    if fraction is None or not 0 < fraction <= 1:
        yield f"engine.kv_cache_memory_fraction={shown(engine.kv_cache_memory_fraction)}: must lie in (0, 1]"
    share = engine.gpu_memory_utilization
    if share is not None and ((value := number(share)) is None or not 0 < value <= 1):
        yield f"engine.gpu_memory_utilization={shown(share)}: must lie in (0, 1], or be null"
    elif share is not None and fraction != EngineConfig.kv_cache_memory_fraction:
        yield "engine.gpu_memory_utilization: set it or engine.kv_cache_memory_fraction, not both"
    for name in ("enable_prefix_caching", "enforce_eager"):
        if not isinstance(getattr(engine, name), bool):
            yield f"engine.{name}={shown(getattr(engine, name))}: must be true or false"
