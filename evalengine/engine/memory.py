"""How many KV pages the pool has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from evalengine.config import EngineConfig
from evalengine.engine.cuda_graphs import graph_bytes, has_graphs
from evalengine.engine.read_out import SHARE
from evalengine.engine.settings import Settings
from evalengine.errors import ConfigError
from evalengine.layers.embedding import rows_per_slice
from evalengine.models.spec import ModelSpec

CPU_POOL_BYTES = 4 << 30  # unless one sequence or num_kv_blocks needs more: a CPU's memory is shared with all else
BOOKKEEPING_BYTES = 400  # of Python objects a page (`Block` and its place in the free list)
SAMPLING_BYTES = 88  # for each logit of a row that is sampled with top-k and top-p, measured
CGROUP = Path("/sys/fs/cgroup")


def memory_problems(config: EngineConfig, spec: ModelSpec, settings: Settings) -> Iterator[str]:
    """What cannot fit even while no weight is loaded, a sentence each: the least that the settings need, not all."""
    try:
        plan_num_kv_blocks(config, spec, settings)
    except ConfigError as error:
        yield from error.problems
    free = _free_bytes(settings.device)
    step = _activation_bytes(config, spec, settings)
    if step > free:
        tokens = _most_tokens(config, settings)
        yield (
            f"engine.max_num_batched_tokens={config.max_num_batched_tokens}: a step of {tokens} tokens takes at least "
            f"{_gib(step)}, {_gib(free)} are free; lower it"
        )
    table = 4 * settings.max_model_len * spec.head_dim  # float32 cos and sin of half the head
    if table > free:
        yield (
            f"engine.max_model_len={settings.max_model_len}: RoPE's tables take {_gib(table)}, {_gib(free)} are free; "
            "lower it"
        )


def plan_num_kv_blocks(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """The pages that the configuration asks for, or as many as can be useful within the memory fraction.

    Raises: ConfigError if they do not fit, or if one sequence of `max_model_len` tokens would not; it names the cures.
    """
    kv_heads = spec.kv_heads_of_rank(settings.tensor_parallel_size)
    page = 2 * spec.num_layers * settings.block_size * kv_heads * spec.head_dim * settings.dtype.itemsize
    free = _free_bytes(settings.device)
    if settings.device.type == "cpu":
        free //= settings.tensor_parallel_size  # the ranks' pools lie in the same memory
    if has_graphs(config, settings):
        free = max(0, free - graph_bytes(spec, config.max_num_seqs, settings))
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * page > free:
            raise ConfigError(
                f"engine.num_kv_blocks={config.num_kv_blocks}: that pool takes {_gib(config.num_kv_blocks * page)}, "
                f"{_gib(free)} are free; at most {free // page} fit"
            )
        books, ram = config.num_kv_blocks * BOOKKEEPING_BYTES, _free_bytes(torch.device("cpu"))
        if books > ram:
            raise ConfigError(
                f"engine.num_kv_blocks={config.num_kv_blocks}: keeping books of so many pages takes {_gib(books)} of "
                f"the host's memory, {_gib(ram)} are free; take fewer, larger pages (engine.block_size)"
            )
        return config.num_kv_blocks
    one_sequence = -(-settings.max_model_len // settings.block_size)
    budget = _pool_bytes(config, spec, settings, free)
    if settings.device.type == "cpu":
        budget = min(budget, max(CPU_POOL_BYTES, one_sequence * page))
    num_blocks = min(budget // page, one_sequence * config.max_num_seqs)
    if num_blocks < one_sequence:
        raise ConfigError(
            f"engine.max_model_len={settings.max_model_len}: one sequence needs {_gib(one_sequence * page)} of KV "
            f"cache, and {_gib(budget)} are to be had; lower engine.max_model_len, raise "
            f"{_share(config)} or set engine.num_kv_blocks"
        )
    return num_blocks


def _pool_bytes(config: EngineConfig, spec: ModelSpec, settings: Settings, free: int) -> int:
    """What the pool may take of what is free."""
    if config.gpu_memory_utilization is None:
        return int(free * config.kv_cache_memory_fraction)
    others = int(torch.cuda.mem_get_info(settings.device)[1] * (1 - config.gpu_memory_utilization))
    return max(0, free - others - _activation_bytes(config, spec, settings) - _logits_bytes(config, spec, settings))


def _activation_bytes(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """Of a step's tokens, at least: residual, its norm, gate and up."""
    activation = 4 if settings.numerics == "exact" else settings.dtype.itemsize
    features = spec.hidden_size + spec.intermediate_size // settings.tensor_parallel_size
    return _most_tokens(config, settings) * activation * 2 * features


def _logits_bytes(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """Of a slice's rows: float32 logits, their logprobs, a copy of either; and what sampling some of them takes."""
    rows = min(rows_per_slice(spec.vocab_size, settings.device), _most_tokens(config, settings))
    return rows * spec.vocab_size * (12 + SAMPLING_BYTES // SHARE)


def _most_tokens(config: EngineConfig, settings: Settings) -> int:
    """Tokens of a step."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * settings.max_model_len)


def _share(config: EngineConfig) -> str:
    """The setting that bounds the pool, as it is."""
    if config.gpu_memory_utilization is None:
        return f"engine.kv_cache_memory_fraction (now {config.kv_cache_memory_fraction})"
    return f"engine.gpu_memory_utilization (now {config.gpu_memory_utilization})"


def check_weights_fit(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int, ranks: int = 1
) -> None:
    """Whether one rank's weights and RoPE's tables can be held at all, asked before they are allocated: a sentence
    instead of a process killed half-way. Raises ConfigError."""
    weights = spec.num_parameters * dtype.itemsize // ranks
    tables = max_model_len * spec.head_dim * dtype.itemsize
    free = _free_bytes(device)
    if weights + tables > free:
        raise ConfigError(
            f"model.path: the model's {spec.num_parameters:,} weights take {_gib(weights)}"
            f"{f' on each of {ranks} ranks' if ranks > 1 else ''} and the tables of "
            f"engine.max_model_len={max_model_len} positions {_gib(tables)}, {_gib(free)} are free; take a smaller "
            "model or engine.max_model_len, engine.dtype=bfloat16, or a machine with more memory"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading, or an engine before, has left to torch is free too
        return torch.cuda.mem_get_info(device)[0]
    try:  # MemAvailable counts what the page cache can give back
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container's own limit; of what it uses, files that were read can be given back
        names = ("memory.max", "memory.current", "memory.stat")
        limit, used, statistics = ((CGROUP / name).read_text().strip() for name in names)
    except OSError:
        return free
    cached = sum(int(line.split()[1]) for line in statistics.splitlines() if line.startswith("inactive_file "))
    return free if limit == "max" else min(free, max(0, int(limit) - int(used) + cached))
