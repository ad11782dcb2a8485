"""The comparisons of attention: its schedules in a model's own shapes, over pages as a step has them.

S sequences, B pages, Hq/Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from evalengine.kernels import attention
from evalengine.kernels.attention_batch import SharedBlocks
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.matmul_device import gpu_of
from evalengine.verification import operands
from evalengine.verification.verdict import KernelsVerdict

# (new tokens, tokens) of each sequence, decodes first. Lengths lie on both sides of the borders of blocks (64) and
# chunks (1024).
SEQUENCES = ((1, 1), (1, 65), (1, 1024), (1, 2100), (1, 1217), (3, 3), (130, 130), (17, 1030), (67, 2111))
BEYOND = 67  # tokens by which a decode's sequence is longer than a window that is compared


@dataclass
class _Batch:
    """A batch as `attention.RaggedBatch` describes it."""

    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    num_decodes: int
    max_decode_kv_len: int
    shared: SharedBlocks | None = None
    plans: dict[Any, Any] = field(default_factory=dict)


def verify_attention(
    verdict: KernelsVerdict,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    variant: AttentionVariant,
    sequences: Sequence[tuple[int, int]] = SEQUENCES,
) -> None:
    """Compares every schedule on a batch of decodes and prefills over shuffled pages, whose slots past each end and
    before each window are NaN, and on its decodes of one chunk alone, so that nothing is merged; then decode against
    prefill. Without a window, the decodes have what they can in the longest one's pages, and a schedule that reads
    shared pages once does."""
    random = operands.Random(dtype, device)
    index = torch.empty(0, device=device).get_device()
    schedules = attention.schedules(head_dim, page_size, dtype, index)
    if variant.window is not None:
        sequences = _beyond(sequences, variant.window)
    if variant.is_plain and any(schedule.hopper for schedule in schedules):
        sequences = [*sequences, _second_tiles(num_heads // num_kv_heads, num_kv_heads, index)]
    table, caches = _paged(sequences, page_size, num_kv_heads, head_dim, variant.window, random)
    shares = variant.window is None and attention.CHUNK % page_size == 0
    if shares:
        _share(table, [length for rows, length in sequences if rows == 1], page_size)
    q = random(sum(rows for rows, _ in sequences), num_heads, head_dim)
    sinks = random(num_heads) if variant.sinks else None
    in_one_chunk = len(list(takewhile(lambda lens: lens[0] == 1 and lens[1] <= attention.CHUNK, sequences)))

    def run(schedule: Any, count: int, as_decodes: bool = True) -> Tensor:
        batch = _batch(sequences[:count], table, as_decodes)
        if shares and as_decodes:
            batch.shared = _shared_blocks([length for rows, length in sequences[:count] if rows == 1], page_size, table)
        # It runs twice, as two layers would: the second call repeats the launches of the first.
        own = (q[: sum(batch.query_lens)], (caches[0], caches[1]), batch, variant, sinks, schedule)
        return torch.stack([attention.paged_attention(*own) for _ in range(2)])

    where = f"D{head_dim} Hq{num_heads} Hkv{num_kv_heads} page {page_size} {dtype}" + f", {variant}".removesuffix(", ")
    counts = (len(sequences), in_one_chunk)
    try:
        expected = run(attention.REFERENCE, len(sequences))
    except OutOfResources as error:  # float32 with a head_dim of 256 on a GPU with little shared memory
        verdict.fail(f"attention ({where}): the reference schedule does not fit on this GPU: {error}")
        return
    for schedule in schedules:
        for count in counts:
            rows = sum(rows for rows, _ in sequences[:count])
            verdict.compare("attention", schedule, where, partial(run, schedule, count), expected[:, :rows])
    as_prefill = run(attention.REFERENCE, len(sequences), False)
    verdict.require_equal(f"attention, decode against prefill ({where})", as_prefill, expected)


def _beyond(sequences: Sequence[tuple[int, int]], window: int) -> list[tuple[int, int]]:
    """The sequences with a decode and a chunk of a prefill more, both of them longer than the window."""
    decodes = list(takewhile(lambda lens: lens[0] == 1, sequences))
    return [*decodes, (1, window + BEYOND), *sequences[len(decodes) :], (BEYOND, window + 2 * BEYOND)]


def _second_tiles(group: int, num_kv_heads: int, device: int) -> tuple[int, int]:
    """(new tokens, tokens) of a sequence with so many tiles that one of the Hopper kernel's programs (one an SM) has
    two."""
    from evalengine.kernels.attention_hopper import TILE

    tiles = gpu_of(device).multiprocessors // num_kv_heads + 1
    tokens = -(-tiles * TILE // group)
    return tokens, tokens + 65


def _paged(
    sequences: Sequence[tuple[int, int]],
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    random: operands.Random,
) -> tuple[Tensor, Tensor]:
    """A block table [S, pages] and the K and V pools [2, B, page_size, Hkv, D] behind it."""
    pages = [-(-length // page_size) for _, length in sequences]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
    like = random(1)
    caches = like.new_full((2, sum(pages), page_size, num_kv_heads, head_dim), float("nan"))
    table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    for i, (count, own) in enumerate(zip(pages, order.split(pages), strict=True)):
        (rows, length), table[i, :count] = sequences[i], own.int()
        positions = torch.arange(0 if window is None else max(0, length - rows + 1 - window), length)
        page, place = own[positions // page_size].to(like.device), (positions % page_size).to(like.device)
        caches[:, page, place] = random(2, len(positions), num_kv_heads, head_dim)
    return table.to(like.device), caches


def _share(table: Tensor, lengths: Sequence[int], page_size: int) -> None:
    """Gives the decodes, the first rows of the table, the longest one's pages for all blocks that they fill."""
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    for row, length in enumerate(lengths):
        pages = length // max(page_size, attention.BLOCK) * max(page_size, attention.BLOCK) // page_size
        table[row, :pages] = table[longest, :pages]


def _shared_blocks(lengths: Sequence[int], page_size: int, table: Tensor) -> SharedBlocks:
    """What decodes of these lengths share after `_share`: in each chunk one unit, of all that have as much in it as
    the second of them. Its tiles are of two, and one program is to take all of them."""
    unit, chunks = max(page_size, attention.BLOCK), -(-max(lengths) // attention.CHUNK)
    tokens = torch.zeros(len(lengths), chunks, dtype=torch.int32)
    tiles: list[tuple[int, int, int, int]] = []
    members: list[int] = []
    for chunk in range(chunks):
        before = chunk * attention.CHUNK
        whole = [min(length // unit * unit - before, attention.CHUNK) for length in lengths]
        shared = max(0, sorted(whole)[-2]) if len(whole) > 1 else 0
        rows = [row for row, own in enumerate(whole) if own >= shared > 0]
        tokens[rows, chunk] = shared
        for pair in (rows[first : first + 2] for first in range(0, len(rows), 2)):
            tiles.append((chunk, shared, len(members), len(pair)))
            members += pair
    listed = torch.tensor(tiles or [(0, 0, 0, 0)]), torch.tensor(members or [0]), torch.tensor([len(tiles)])
    on_device = [array.int().to(table.device) for array in listed]
    return SharedBlocks(on_device[0], on_device[1], on_device[2], tokens.to(table.device), most_tiles=1)


def _batch(sequences: Sequence[tuple[int, int]], table: Tensor, as_decodes: bool) -> _Batch:
    """A batch of the table's first sequences. With `as_decodes` its leading single rows are decodes, else all are
    prefills."""
    query_lens, kv_lens = ([lens[i] for lens in sequences] for i in range(2))
    starts = torch.tensor([0, *query_lens], device=table.device).cumsum(0).int()
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=table.device)
    decodes = [length for rows, length in takewhile(lambda lens: lens[0] == 1, sequences)] if as_decodes else []
    own = table[: len(sequences)]
    return _Batch(own, starts, lengths, query_lens, kv_lens, len(decodes), max(decodes, default=0))
