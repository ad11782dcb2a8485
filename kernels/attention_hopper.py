"""`native` prefill attention for Hopper: `attention.py`'s arithmetic, with one warp to load and two groups to work.

    T query rows (tokens), Hq/Hkv heads, D head_dim (64 or 128), B pages.

A tile is 128 rows (token, head of the group), 64 for each of two consumer warp groups. A producer warp walks the same
tiles and fills a ring of K and V blocks by TMA, across tiles, so that a tile's first block is there while the
result of the tile before is written. Each consumer issues the next block's q.k before p.v of the block at hand, so that
its exponentials overlap with the tensor cores; the two groups drift apart and fill each other's gaps.

It is written in Gluon, because Triton's own pipeliner leaves the tensor cores idle in between. Per row the numbers are
added in the same order and rounded at the same points as in `attention.py`, whose docstring states them; a test and
`verify kernels` compare bytes.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from evalengine.kernels.attention_hopper_kernel import prefill_kernel
from evalengine.kernels.launching.launch import Launch, launch
from evalengine.kernels.launching.pinned import to_device

TILE = 128  # rows of a tile
ROWS = 64  # rows of one consumer
STAGES = {64: 4, 128: 3}  # by head_dim: in addition to q, 2 * STAGES * 64 * head_dim * 2 bytes of shared memory


def covers(dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether this kernel takes the model: half precision, whole blocks in a page, tiles that fit in shared memory."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim in STAGES and page_size % 64 == 0


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    batch: Any,
    scale: float,
    strides: tuple[int, ...],
    chunk: int,
) -> Launch | None:
    """`attention.paged_attention` of the rows past the decodes into `out`; `scale` is in base 2, `batch` a
    `RaggedBatch`. Returns the launch.

    The first call with a batch copies its table of tiles to the device, so it must precede a CUDA graph's capture.
    """
    page, heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // heads
    key = (__name__, group)
    if key not in batch.plans:
        batch.plans[key] = to_device(_table(batch, group), q.device)
    table = batch.plans[key]
    tiles = table.shape[0]
    by_tma = ROWS % group == 0 and q.is_contiguous() and q.data_ptr() % 16 == 0
    args = (
        q, _q_descriptor(q, group) if by_tma else None, _descriptor(k_cache), _descriptor(v_cache), v_cache, out,
        batch.block_table, table, tiles, heads, scale, *strides,
    )  # fmt: skip
    constants = (group, head_dim, page, chunk, TILE, STAGES[head_dim], by_tma)
    grid = (min(_num_sms(q.device), tiles * heads), 1, 1)
    return launch(prefill_kernel, grid, args, constants, num_warps=4, num_stages=1)


def _table(batch: Any, group: int) -> Tensor:
    """int32 [tiles, 5], the longest first: sequence, its first row, its rows, KV tokens, the tile's number in it."""
    rows = []
    first = batch.num_decodes
    starts = [first, *accumulate(batch.query_lens[first:], initial=first)][1:]
    for s, (start, queries, length) in enumerate(
        zip(starts, batch.query_lens[first:], batch.kv_lens[first:], strict=False), first
    ):
        rows += [(s, start, queries, length, tile) for tile in range(-(-queries * group // TILE))]
    rows.sort(key=lambda row: row[2] - row[3] - (row[4] + 1) * TILE // group)
    return torch.tensor(rows, dtype=torch.int32)


def _q_descriptor(q: Tensor, group: int) -> TensorDescriptor:
    """[T, Hq, D], read in blocks of one consumer's rows: as many tokens, and the heads that share a KV head."""
    layout = _q_layout(q.dtype, group, q.shape[2])
    return TensorDescriptor(q, list(q.shape), list(q.stride()), [ROWS // group, group, q.shape[2]], layout)


@cache
def _q_layout(dtype: torch.dtype, group: int, head_dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([ROWS // group, group, head_dim], _element(dtype))


def _descriptor(cache: Tensor) -> TensorDescriptor:
    """The pool as [slots, Hkv * D], read in blocks of 64 slots and one head."""
    pages, page, heads, dim = cache.shape
    return TensorDescriptor(cache, [pages * page, heads * dim], [heads * dim, 1], [64, dim], _layout(cache.dtype, dim))


@cache
def _layout(dtype: torch.dtype, head_dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([64, head_dim], _element(dtype))


def _element(dtype: torch.dtype) -> gl.dtype:
    return gl.bfloat16 if dtype == torch.bfloat16 else gl.float16


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
