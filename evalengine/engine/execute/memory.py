"""Plans how many KV pages the pool has, and refuses what cannot fit the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from evalengine.config.schema import EngineConfig
from evalengine.engine.execute.cuda_graphs import graph_bytes, has_graphs
from evalengine.engine.execute.read_out import SHARE
from evalengine.engine.kv_layout import kv_layout
from evalengine.engine.settings import Settings, in_chunks
from evalengine.engine.states import NUM_SNAPSHOTS, state_bytes
from evalengine.errors import ConfigError
from evalengine.layers.embedding import rows_per_slice
from evalengine.models.decoder import num_parameters
from evalengine.models.spec import ModelSpec
from evalengine.models.widths import widths

CPU_POOL_BYTES = 4 << 30  # a CPU's pool, unless one sequence or num_kv_blocks needs more
BOOKKEEPING_BYTES = 400  # Python objects of one page: `CachedBlock` and its place in the free list
SAMPLING_BYTES = 88  # measured for each logit of a row that is sampled with top-k and top-p
CGROUP = Path("/sys/fs/cgroup")


def memory_problems(config: EngineConfig, spec: ModelSpec, settings: Settings) -> Iterator[str]:
    """A sentence for each thing that cannot fit even before weights are loaded; only a lower bound is compared."""
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
    rows = settings.max_model_len + spec.short_positions(settings.max_model_len)
    table = 4 * rows * spec.head_dim  # float32 cos and sin, each of half the head
    if table > free:
        yield (
            f"engine.max_model_len={settings.max_model_len}: RoPE's tables take {_gib(table)}, {_gib(free)} are free; "
            "lower it"
        )


def plan_num_kv_blocks(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """The number of pages, of all layers, that the configuration requests, or as many as can be useful within the
    memory fraction.

    Raises: ConfigError if they do not fit, or if one sequence of `max_model_len` tokens would not; it names the fixes.
    """
    kv_heads, layout = spec.kv_heads_of_rank(settings.tensor_parallel_size), kv_layout(spec, settings)
    numbers = math.prod(layout.pool_shape(layout.num_tables, settings.block_size, kv_heads, spec.head_dim))
    page = numbers * settings.dtype.itemsize
    free = _free_bytes(settings.device)
    if settings.device.type == "cpu":
        free //= settings.tensor_parallel_size  # the ranks' pools share this memory
    if has_graphs(config, settings):
        free = max(0, free - graph_bytes(spec, config.max_num_seqs, settings))
    chunked = in_chunks(settings.numerics, settings.device)
    slot = state_bytes(spec, _activation_dtype(settings), settings.tensor_parallel_size, chunked=chunked)
    states = (config.max_num_seqs + NUM_SNAPSHOTS) * slot
    if states > free:
        raise ConfigError(
            f"engine.max_num_seqs={config.max_num_seqs}: the states of so many sequences take {_gib(states)}, "
            f"{_gib(free)} are free; lower it"
        )
    free -= states
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
    one_sequence = layout.blocks_for(settings.max_model_len, settings.block_size, config.max_num_batched_tokens)
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
    """How many of the free bytes the pool may take."""
    if config.gpu_memory_utilization is None:
        return int(free * config.kv_cache_memory_fraction)
    others = int(torch.cuda.mem_get_info(settings.device)[1] * (1 - config.gpu_memory_utilization))
    return max(0, free - others - _activation_bytes(config, spec, settings) - _logits_bytes(config, spec, settings))


def _activation_bytes(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """A lower bound of the activations of a step's tokens: residual, its norm, gate and up; or, of experts, the inputs
    and outputs of their last product, a row of each for every expert of a token; and what a recurrence makes of the
    step's chunks, of which each sequence's last may be partial."""
    sizes, ranks = widths(spec), settings.tensor_parallel_size
    inner = sizes.inner // ranks
    feed_forward = max(2 * inner, inner + sizes.outputs // ranks if spec.mixture is not None else 0)
    tokens, chunk = _most_tokens(config, settings), 0
    chunks = -(-tokens // 64) + min(tokens, config.max_num_seqs)
    if in_chunks(settings.numerics, settings.device):
        chunk = max((kind.of_rank(ranks).chunk_bytes for kind in spec.recurrent_kinds), default=0)
    rows = tokens * _activation_dtype(settings).itemsize * (2 * sizes.hidden + feed_forward)
    return rows + chunks * chunk


def _activation_dtype(settings: Settings) -> torch.dtype:
    return torch.float32 if settings.numerics == "exact" else settings.dtype


def _logits_bytes(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """Bytes of a slice's float32 logits, their logprobs and a copy of either, and of sampling a share of the rows."""
    rows = min(rows_per_slice(spec.vocab_size, settings.device), _most_tokens(config, settings))
    return rows * spec.vocab_size * (12 + SAMPLING_BYTES // SHARE)


def _most_tokens(config: EngineConfig, settings: Settings) -> int:
    """The largest number of tokens in a step."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * settings.max_model_len)


def _share(config: EngineConfig) -> str:
    """The setting that bounds the pool, with its value, for a message."""
    if config.gpu_memory_utilization is None:
        return f"engine.kv_cache_memory_fraction (now {config.kv_cache_memory_fraction})"
    return f"engine.gpu_memory_utilization (now {config.gpu_memory_utilization})"


def check_weights_fit(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int, ranks: int = 1, saved: int = 0
) -> None:
    """Raises ConfigError if one rank's weights and RoPE's tables do not fit the free memory. Checked before they are
    allocated, so that the user reads a sentence and the process is not killed half-way. saved: the bytes of all ranks
    that packed weights save."""
    weights = (num_parameters(spec) * dtype.itemsize - saved) // ranks
    tables = (max_model_len + spec.short_positions(max_model_len)) * spec.head_dim * dtype.itemsize
    free = _free_bytes(device)
    if weights + tables > free:
        raise ConfigError(
            f"model.path: the model's {num_parameters(spec):,} weights take {_gib(weights)}"
            f"{f' on each of {ranks} ranks' if ranks > 1 else ''} and the tables of "
            f"engine.max_model_len={max_model_len} positions {_gib(tables)}, {_gib(free)} are free; take a smaller "
            "model or engine.max_model_len, engine.dtype=bfloat16, or a machine with more memory"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch has cached since loading or a former engine is free, too
        return torch.cuda.mem_get_info(device)[0]
    try:  # MemAvailable counts what the page cache can give back
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # the system is not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container has its own limit; cached files count as used but can be given back
        names = ("memory.max", "memory.current", "memory.stat")
        limit, used, statistics = ((CGROUP / name).read_text().strip() for name in names)
    except OSError:
        return free
    cached = sum(int(line.split()[1]) for line in statistics.splitlines() if line.startswith("inactive_file "))
    return free if limit == "max" else min(free, max(0, int(limit) - int(used) + cached))
