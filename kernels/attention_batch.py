"""A step as attention reads it: a ragged batch over pages, the blocks that decodes share, and how the work is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

KVCache = tuple[Tensor, Tensor]  # the pools of keys and values, [B, block_size, Hkv, D] each
TILE_DECODES = 16  # decodes of a tile at most


@dataclass(frozen=True)
class AttentionSchedule:
    """How attention's work is cut into programs. No choice here changes a bit."""

    block_m: int  # query rows (token, head of the group) in a prefill tile
    num_warps: int
    num_stages: int
    tma: bool = True  # prefill: KV blocks by tensor descriptor where page size and head_dim allow it
    # Prefill of a plain variant by `attention_hopper`, where it covers the model; it ignores the fields above.
    hopper: bool = False
    decode_warps: int = 4
    decode_stages: int = 2
    # Both limits count decode's (KV head, chunk, sequence) programs, as if a window began with a chunk. On an H200
    # working by blocks took 21 against 29 us for 8 programs, and 87 against 77 us for 512.
    extra_stage_max: int = 256  # decode has one stage more with at most so many programs
    by_block_max: int = 32  # decode works block by block with at most so many programs
    # Rows of a tile, warps and stages of `attention_decode`'s shared part; 0: every decode reads all of its tokens.
    shared_rows: int = 0
    shared_warps: int = 4
    shared_stages: int = 2


@dataclass(frozen=True)
class SharedBlocks:
    """The first blocks of a chunk that several decodes of a step have in the same pages, to be read once for all.

    A unit is the decodes that share the first blocks of one chunk. It is cut into tiles, each of which one program
    takes at once. A decode is in one unit of a chunk at most. Everything lies on the device, so that a CUDA graph may
    be replayed with other units.
    """

    tiles: Tensor  # int32 [tiles, 4]: the chunk, its shared tokens, the tile's first place in `members`, their number
    members: Tensor  # int32: rows of the batch, tile by tile
    count: Tensor  # int32 [1]: how many tiles there are
    tokens: Tensor  # int32 [S, chunks]: shared tokens at the beginning of each decode's chunk, a multiple of a block
    most_tiles: int  # the count, or more


class RaggedBatch(Protocol):
    """The part of a step's metadata that attention reads (`layers.metadata.AttentionMetadata`). Decodes come first.

    block_table int32 [S, pages]; cu_seqlens_q int32 [S + 1]; seqlens_k int32 [S], KV tokens with the sequence's new
    rows; query_lens and kv_lens the same on the host; the first num_decodes sequences have one row each.
    """

    @property
    def block_table(self) -> Tensor: ...
    @property
    def cu_seqlens_q(self) -> Tensor: ...
    @property
    def seqlens_k(self) -> Tensor: ...
    @property
    def query_lens(self) -> list[int]: ...
    @property
    def kv_lens(self) -> list[int]: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def max_decode_kv_len(self) -> int: ...
    # None where each decode reads all its tokens.
    @property
    def shared(self) -> SharedBlocks | None: ...
    # A kernel keeps here what it computed from these once for all layers of a step, and its memory, which a CUDA graph
    # captured with the batch needs for as long as it lives. "workspace", if present, returns float32 [n] for n.
    @property
    def plans(self) -> dict[Any, Any]: ...
