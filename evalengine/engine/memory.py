"""How many KV pages the pool has."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from evalengine.config import EngineConfig
from evalengine.engine.settings import Settings
from evalengine.errors import ConfigError
from evalengine.models.config import ModelSpec

CPU_POOL_BYTES = 4 << 30  # unless one sequence or num_kv_blocks needs more: a CPU's memory is shared with all else
CGROUP = Path("/sys/fs/cgroup")


def plan_num_kv_blocks(config: EngineConfig, spec: ModelSpec, settings: Settings) -> int:
    """The pages that the configuration asks for, or as many as can be useful within the memory fraction.

    Raises: ConfigError if they do not fit, or if one sequence of `max_model_len` tokens would not; it names the cures.
    """
    page = 2 * spec.num_layers * settings.block_size * spec.num_kv_heads * spec.head_dim * settings.dtype.itemsize
    free = _free_bytes(settings.device)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * page > free:
            raise ConfigError(
                f"engine.num_kv_blocks={config.num_kv_blocks}: that pool takes {_gib(config.num_kv_blocks * page)}, "
                f"{_gib(free)} are free; at most {free // page} fit"
            )
        return config.num_kv_blocks
    one_sequence = -(-settings.max_model_len // settings.block_size)
    budget = int(free * config.kv_cache_memory_fraction)
    if settings.device.type == "cpu":
        budget = min(budget, max(CPU_POOL_BYTES, one_sequence * page))
    num_blocks = min(budget // page, one_sequence * config.max_num_seqs)
    if num_blocks < one_sequence:
        raise ConfigError(
            f"engine.max_model_len={settings.max_model_len}: one sequence needs {_gib(one_sequence * page)} of KV "
            f"cache, and {_gib(budget)} are to be had; lower engine.max_model_len, raise "
            f"engine.kv_cache_memory_fraction (now {config.kv_cache_memory_fraction}) or set engine.num_kv_blocks"
        )
    return num_blocks


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
