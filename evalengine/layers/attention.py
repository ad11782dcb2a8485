"""Attention over the paged KV cache.

T tokens, Hq/Hkv heads, D head_dim, B pages of `block_size` tokens.
"""

from __future__ import annotations

from torch import Tensor

from evalengine.layers.base import Layer
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops


class PagedAttention(Layer):
    """Stores the step's k and v, then attends: KV is written before it is read."""

    def __init__(self, ops: Ops, scale: float) -> None:
        super().__init__(ops)
        self.scale = scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], pools [B, block_size, Hkv, D] -> [T, Hq, D]."""
        k_cache, v_cache = kv_cache
        self.ops.store_kv(k, v, k_cache, v_cache, metadata.slot_mapping)
        return self.ops.attention(q, k_cache, v_cache, metadata, self.scale)
