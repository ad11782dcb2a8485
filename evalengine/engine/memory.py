"""How many KV pages the pool has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evalengine.config import EngineConfig
from evalengine.errors import ConfigError
from evalengine.models.config import ModelSpec

CPU_POOL_BYTES = 4 << 30  # at most, unless num_kv_blocks says otherwise: a CPU's memory is shared with everything else
DEFAULT_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Pool:
    num_blocks: int
    block_size: int


def plan_pool(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Pool:
    """The pool that the settings ask for, or as large as can be useful within the memory fraction.

    Raises: ConfigError if one sequence of `max_model_len` tokens would not fit; it names the cures.
    """
    block_size = DEFAULT_BLOCK_SIZE if config.block_size == "auto" else int(config.block_size)
    if block_size > max(max_model_len, 256):
        raise ConfigError(
            f"engine.block_size={block_size}: a page longer than any sequence (max_model_len={max_model_len}) only "
            "wastes memory; leave it at auto, or take 16 to 256"
        )
    needed = -(-max_model_len // block_size)
    block_bytes = 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    free = _free_bytes(device)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * block_bytes > free:
            raise ConfigError(
                f"engine.num_kv_blocks={config.num_kv_blocks}: that pool takes "
                f"{config.num_kv_blocks * block_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
                f"at most {free // block_bytes} fit"
            )
        return Pool(config.num_kv_blocks, block_size)
    budget = int(free * config.kv_cache_memory_fraction)
    if device.type == "cpu":
        budget = min(budget, CPU_POOL_BYTES)
    num_blocks = min(budget // block_bytes, needed * config.max_num_seqs)
    if num_blocks < needed:
        raise ConfigError(
            f"engine.max_model_len={max_model_len}: one sequence needs {needed * block_bytes / 2**30:.1f} GiB of KV "
            f"cache, and {budget / 2**30:.1f} GiB are to be had; lower engine.max_model_len or raise "
            f"engine.kv_cache_memory_fraction (now {config.kv_cache_memory_fraction})"
        )
    return Pool(num_blocks, block_size)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:  # MemAvailable counts what the page cache can give back
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no MemAvailable in /proc/meminfo")
