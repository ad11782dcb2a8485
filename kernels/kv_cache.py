"""Writing keys and values into the paged pools.

    T tokens, Hkv heads, D head_dim, B pages of `block_size` tokens.

Rounding points: the value is rounded once, to the pool's dtype (not at all where that is the model's).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.launching.launch import launch
from evalengine.kernels.rope import tile_shape


@triton.jit
def slot_offset(slot, page_stride, slot_stride, PAGE: tl.constexpr):
    """Elements from a pool's start to the first head of an int64 slot = page * PAGE + position, slot >= 0."""
    return (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride


@triton.jit
def _store_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    page_stride, slot_stride, head_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    token = (tl.program_id(0) // parts).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        heads = ((tl.program_id(0) % parts) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        mask = (heads < HEADS) & (columns < HEAD_DIM)
        k = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + columns, mask)
        v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + columns, mask)
        target = slot_offset(slot, page_stride, slot_stride, PAGE) + heads * head_stride + columns
        tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask)
        tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k, v [T, Hkv, D] (any token and head stride) into the pools [B, block_size, Hkv, D] (strided views of one
    shape and stride), token t at slot_mapping[t] = page * block_size + position (int64 [T]); slot -1 is skipped."""
    tokens, heads, head_dim = k.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "the pools are views of one layout"
    if not tokens:
        return
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    rows, columns, warps = tile_shape(heads, head_dim, k.element_size())
    args = (k, v, k_cache, v_cache, slot_mapping, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3])
    constants = (heads, head_dim, k_cache.shape[1], rows, columns)
    launch(_store_kv_kernel, (tokens * -(-heads // rows), 1, 1), args, constants, warps, num_stages=1)
