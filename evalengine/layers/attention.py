"""Attention over the paged KV cache, and the norm, RoPE and KV store before it.

T tokens, Hq/Hkv heads, D head_dim, B pages of `block_size` tokens.
"""

from __future__ import annotations

from torch import Tensor, nn

from evalengine.errors import ConfigError
from evalengine.kernels.attention_batch import KVCache
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers.base import Layer, shard_rows
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Heads, Ops
from evalengine.layers.rows import RowNorm


class NormRopeStore(Layer):
    """Norms and rotates the projected q and k, and stores k and v in the cache. One kernel where the ops fuse it."""

    def forward(
        self,
        qkv: Heads,
        norms: tuple[RowNorm, RowNorm] | None,
        cos: Tensor,
        sin: Tensor,
        kv_cache: KVCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> q as attention takes it, [T, Hq, D].

        norms: over each head's q and k, if the model has them.
        """
        head_norms = (norms[0].weight, norms[1].weight, norms[0].norm) if norms else None
        return self.ops.qk_norm_rope_store(qkv, head_norms, cos, sin, kv_cache, slot_mapping)


class PagedAttention(Layer):
    """Attends over the pools, which hold the step's k and v already: KV is written before it is read."""

    def __init__(self, ops: Ops, variant: AttentionVariant, num_heads: int) -> None:
        """num_heads: of all ranks. Raises `ConfigError` for a variant that the ops do not compute."""
        super().__init__(ops)
        if problems := ops.problems(variant):
            raise ConfigError("; ".join(problems))
        self.variant, self.num_heads = variant, num_heads
        self.sinks = self.new_parameter(num_heads // ops.tp.size) if variant.sinks else None

    def checkpoint_shards(self, name: str) -> dict[str, tuple[int, ...]]:
        return {name: (self.num_heads,)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard: str) -> None:
        param.copy_(shard_rows(loaded_weight, self.ops.tp.rank, self.ops.tp.size))

    def forward(self, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """This rank's heads q [T, Hq, D], pools [B, block_size, Hkv, D] -> [T, Hq, D]."""
        return self.ops.attention(q, kv_cache, metadata, self.variant, self.sinks)


class StoreKV(Layer):
    """Stores k and v in the pools, as a separate op."""

    def forward(self, k: Tensor, v: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k and v, [T, Hkv, D], as they came, so that a hook sees them."""
        self.ops.store_kv(k, v, kv_cache, slot_mapping)
        return k, v


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v [T, Hkv, D] into the [B, block_size, Hkv, D] pools at slot page * block_size + offset, rounded to
    the pools' dtype. Slot -1 is skipped."""
    has_slot = slot_mapping >= 0
    slots = slot_mapping[has_slot]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = new[has_slot].to(cache.dtype)
