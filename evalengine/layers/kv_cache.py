"""Writes keys and values into the paged pools, for every level that runs plain torch."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v [T, Hkv, D] into the [B, block_size, Hkv, D] pools at slot page * block_size + offset, rounded to
    the pools' dtype. Slot -1 is skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = new[kept].to(cache.dtype)
