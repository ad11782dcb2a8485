"""Resolves an `EngineConfig` for one model and one machine, and finds everything that cannot be honoured, at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from evalengine.config.check import engine_contradictions, resolve_numerics
from evalengine.config.schema import MAX_RANKS, Config, EngineConfig, Numerics
from evalengine.errors import ConfigError
from evalengine.kernels.recurrent_variant import drops_guesses
from evalengine.layers.attention_backends import backend_problems, possible_backends
from evalengine.layers.flash_attention import PAGE_MULTIPLE
from evalengine.layers.kernel_support import head_dim_problems, hidden_size_problems, kernel_problems
from evalengine.models.spec import ModelSpec
from evalengine.models.widths import widths
from evalengine.util.validation import read_as, shown

DEFAULT_BLOCK_SIZE = 64
LARGEST_USEFUL_PAGE = PAGE_MULTIPLE  # tokens; flash-attn needs pages of so many, and nothing needs larger ones
NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Resolved values of `engine.speculation`. Only an earlier run's answers are worth guessing on a CPU, and with recurrent
# layers, whose steps with guesses are prefill steps and have not been timed yet. A recurrent state that is updated
# token by token cannot drop a wrong guess (`execute.rank_runner`).
KNOWN_ANSWERS, RECURRENT = "known answers", "off (recurrent state)"


@dataclass(frozen=True)
class Settings:
    """The resolved settings, with a value in place of every `auto` and null."""

    device: torch.device
    numerics: Numerics
    dtype: torch.dtype  # the dtype of weights and KV
    attention_backend: str  # flash_attn | triton | sdpa (fast); triton (native); exact (exact)
    max_model_len: int
    block_size: int
    num_threads: int
    tensor_parallel_size: int = 1
    speculation: str = "off"  # always | auto | KNOWN_ANSWERS | off | RECURRENT

    @property
    def devices(self) -> list[torch.device]:
        """The device of every rank: rank 0 has `device`, and the others those after it."""
        if self.device.type == "cpu":
            return [self.device] * self.tensor_parallel_size
        first = self.device.index or 0
        return [torch.device("cuda", first + rank) for rank in range(self.tensor_parallel_size)]


def engine_config(engine: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    """The configuration that an LLM was given: as an `EngineConfig`, or as fields of one by name.

    Raises: ConfigError if both are given, and for names that are no fields.
    """
    field_names = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(settings) - field_names)
    if unknown:
        raise ConfigError(f"unknown engine settings {', '.join(unknown)}; known ones: {', '.join(sorted(field_names))}")
    if engine is not None and settings:
        raise ConfigError("give either engine=EngineConfig(...) or its fields as keyword arguments, not both")
    if engine is not None and not isinstance(engine, EngineConfig):
        raise ConfigError(f"engine={shown(engine)}: must be an EngineConfig; or give its fields as keyword arguments")
    return engine or EngineConfig(**settings)


def resolve_settings(config: EngineConfig, batch_invariant: bool, numerics: str, spec: ModelSpec) -> Settings:
    """The settings for one model. Raises one ConfigError with everything that `settings_problems` finds."""
    if problems := list(settings_problems(config, batch_invariant, numerics, spec)):
        raise ConfigError(problems)
    device = torch.device(_device_name(config.device))
    level = resolve_numerics(batch_invariant, numerics, device.type)
    backend = _attention_backend(config, level, device, spec)
    default_block_size = PAGE_MULTIPLE if backend == "flash_attn" else DEFAULT_BLOCK_SIZE
    return Settings(
        device=device,
        numerics=level,
        dtype=_dtype(config, spec),
        attention_backend=backend,
        max_model_len=config.max_model_len or spec.max_position_embeddings,
        block_size=_block_size(config) or default_block_size,
        num_threads=config.num_threads or torch.get_num_threads(),
        tensor_parallel_size=config.tensor_parallel_size,
        speculation=resolve_speculation(config, level, device, spec),
    )


def settings_problems(
    config: EngineConfig, batch_invariant: bool, numerics: str, spec: ModelSpec | None
) -> Iterator[str]:
    """A sentence for each problem. Without `spec` (no model was found), only problems that do not depend on one."""
    try:
        read_as(Config, Config(engine=config, batch_invariant=batch_invariant, numerics=numerics), strict=True)  # type: ignore[arg-type]  # checked here
    except ConfigError as error:
        yield from error.problems
        return
    yield from engine_contradictions(config)
    problems: list[str] = []
    device = torch.device(_device_name(config.device))
    if device.type == "cuda":
        problems = list(_cuda_problems(device, config.tensor_parallel_size))
        yield from problems
    elif config.gpu_memory_utilization is not None:
        yield (
            f"engine.gpu_memory_utilization={config.gpu_memory_utilization}: this run's device is the CPU; "
            "engine.kv_cache_memory_fraction or engine.num_kv_blocks bound its pool"
        )
    try:
        level = resolve_numerics(batch_invariant, numerics, device.type)
    except ConfigError as error:
        yield from error.problems
    else:
        if not problems:  # otherwise there is no device to ask
            yield from _level_problems(config, level, device, spec)
    if spec is not None:
        yield from _length_problems(config, spec.max_position_embeddings)
        yield from _rank_problems(config.tensor_parallel_size, spec)


def _device_name(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    dtype: torch.dtype = spec.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    return dtype


def _block_size(config: EngineConfig) -> int | None:
    """The configured page size in tokens; None for auto."""
    return None if config.block_size == "auto" else int(config.block_size)


def _attention_backend(config: EngineConfig, level: Numerics, device: torch.device, spec: ModelSpec) -> str:
    if level != "fast":
        return "triton" if level == "native" else "exact"
    if config.attention_backend != "auto":
        return config.attention_backend
    return possible_backends(device, _dtype(config, spec), spec.head_dim, _block_size(config), spec.variants)[0]


def in_chunks(level: Numerics, device: torch.device) -> bool:
    """Whether recurrences are computed in chunks (`Ops.chunked`)."""
    return level != "exact" and not kernel_problems(device)


def resolve_speculation(config: EngineConfig, level: Numerics, device: torch.device, spec: ModelSpec) -> str:
    """Whether and how the engine may guess tokens. This is the only place that decides it."""
    if config.speculation != "off" and not drops_guesses(spec.recurrent_kinds, chunked=in_chunks(level, device)):
        return RECURRENT
    if config.speculation != "auto":
        return config.speculation
    if level == "fast":  # a guess could change a bit
        return "off"
    return "auto" if device.type == "cuda" and not spec.recurrences else KNOWN_ANSWERS


def _level_problems(
    config: EngineConfig, level: Numerics, device: torch.device, spec: ModelSpec | None
) -> Iterator[str]:
    """A sentence for each thing that the numerics level, or the requested attention backend, does not cover."""
    dtype = _dtype(config, spec) if spec else None
    head_dim, hidden_size = (spec.head_dim, spec.hidden_size) if spec else (None, None)
    backend = config.attention_backend
    if level == "fast":
        if backend != "auto":
            variants = spec.variants if spec else ()
            for problem in backend_problems(backend, device, dtype, head_dim, _block_size(config), variants):
                yield f"engine.attention_backend={backend}: {problem}"
        if not kernel_problems(device):  # otherwise torch's own ops run
            for problem in hidden_size_problems(hidden_size):
                yield f"numerics=fast: {problem}; use numerics=exact with batch_invariant=true, or engine.device=cpu"
        return
    if backend not in (("auto", "triton") if level == "native" else ("auto",)):
        yield (
            f"engine.attention_backend={backend}: batch_invariant=true (numerics={level}) has its own attention; "
            "leave engine.attention_backend at auto, or set batch_invariant=false"
        )
    if level == "native":
        exact = "use numerics=exact (equal bits on every device)"
        fix = f"{exact}, or batch_invariant=false"
        if dtype is not None and dtype not in NATIVE_DTYPES:
            yield (
                f"numerics=native: it computes in bfloat16, float16 or float32, and this run's dtype is "
                f"{str(dtype).removeprefix('torch.')}; set engine.dtype"
            )
        for problem in (*kernel_problems(device), *head_dim_problems(head_dim)):
            yield f"numerics=native: {problem}; {fix}"
        for problem in hidden_size_problems(hidden_size):  # `fast` has the same kernel, so it is no fix
            yield f"numerics=native: {problem}; {exact}"


def _cuda_problems(device: torch.device, ranks: int) -> Iterator[str]:
    first, count = device.index or 0, torch.cuda.device_count()
    if not torch.cuda.is_available():
        yield f"engine.device={device}: this machine has no usable CUDA device; use engine.device=cpu"
    elif first >= count:
        yield f"engine.device={device}: this machine has {count} CUDA devices, numbered from 0"
    elif first + ranks > count:
        yield (
            f"engine.tensor_parallel_size={ranks}: this machine has {count - first} CUDA devices from {device} on; "
            "take as many ranks at most"
        )


def _rank_problems(ranks: int, spec: ModelSpec) -> Iterator[str]:
    """A sentence if not every rank can have whole heads and as many columns as the others."""
    if uneven := _uneven(ranks, spec):
        fit = ", ".join(map(str, possible_ranks(spec)))
        yield f"engine.tensor_parallel_size={ranks}: {ranks} ranks cannot share this model's {uneven}; it takes {fit}"


def possible_ranks(spec: ModelSpec) -> list[int]:
    """Every tensor-parallel degree that the model can have, 1 first."""
    return [ranks for ranks in range(1, min(spec.num_heads, MAX_RANKS) + 1) if not _uneven(ranks, spec)]


def _uneven(ranks: int, spec: ModelSpec) -> str:
    """The model's sizes that so many ranks cannot share equally; empty if there are none. Several ranks may hold one KV
    head."""
    if ranks == 1:
        return ""
    if spec.module is not None:
        return "layers, which transformers' own module computes (model.implementation)"
    sizes = {"attention heads": spec.num_heads, **widths(spec).shared}
    uneven = [f"{size} {what}" for what, size in sizes.items() if size % ranks]
    if max(ranks, spec.num_kv_heads) % min(ranks, spec.num_kv_heads):
        uneven.append(f"{spec.num_kv_heads} KV heads")
    for kind in spec.recurrent_kinds:
        uneven += kind.uneven(ranks)
    return ", ".join(uneven)


def _length_problems(config: EngineConfig, limit: int) -> Iterator[str]:
    longest = limit if config.max_model_len is None else config.max_model_len
    if not 1 < longest <= limit:
        yield f"engine.max_model_len={longest}: must be in 2 ... {limit} (the model's limit)"
        return
    if config.block_size != "auto" and config.block_size > max(longest, LARGEST_USEFUL_PAGE):
        yield (
            f"engine.block_size={config.block_size}: a page longer than any sequence (max_model_len={longest}) only "
            "wastes memory; leave it at auto, or take 16 to 256"
        )


def uses_ray(config: Config) -> bool:
    """Whether replicas on Ray answer the requests: if requested, or if needed to use all GPUs of this machine."""
    return config.cluster.backend == "ray" or (config.cluster.replicas == "auto" and local_replicas(config) > 1)


def local_replicas(config: Config) -> int:
    """Replicas that this machine's GPUs suffice for; 1 without a GPU, or for a device that is named by number."""
    if not on_gpu(config.engine) or ":" in config.engine.device:
        return 1
    return max(1, torch.cuda.device_count() // config.engine.tensor_parallel_size)


def on_gpu(engine: EngineConfig) -> bool:
    """Whether the engine computes on a GPU of this machine."""
    return engine.device != "cpu" and torch.cuda.is_available()
