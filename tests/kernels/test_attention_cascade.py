"""Decodes that read what they share once have the bytes of decodes that each read everything, whatever is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.kernels import attention, attention_decode
from evalengine.kernels.attention import BLOCK, CHUNK, REFERENCE
from evalengine.kernels.attention_batch import AttentionSchedule, SharedBlocks
from evalengine.layers import shared_blocks
from evalengine.layers.metadata import AttentionMetadata
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.paged_batch import DEVICE, PagedBatch
from tests.kernels.test_attention import TOLERANCE, with_dtypes

# Rows that pad a tile read stale slots, which are NaN here; their results are never stored.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("All-NaN slice", "divide by zero", "invalid value")
]
CASCADE = AttentionSchedule(16, 4, 1, by_block_max=0, shared_rows=64)
ALONE = replace(CASCADE, shared_rows=0)


def round_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: what the shared part leaves is rounded to half precision."""
    real = attention_decode.launch

    def launch(kernel: Any, grid: Any, args: tuple, *rest: Any) -> Any:
        launched = real(kernel, grid, args, *rest)
        if kernel is attention_decode.shared_kernel:
            args[5].copy_(args[5].half())
        return launched

    monkeypatch.setattr(attention_decode, "launch", launch)


def batch_of(
    lengths: list[int], shares: list[tuple[int, int]], page: int, shape: tuple[int, int, int], dtype: torch.dtype,
    **variant: Any,
) -> PagedBatch:  # fmt: skip
    """Decodes of these lengths. shares: for each, another one before it and how many first pages it has of that one."""
    batch = PagedBatch.random([(1, n) for n in lengths], *shape, page, dtype, **variant)
    pages = [list(own) for own in batch.pages]
    for own, (other, count) in zip(pages, shares, strict=True):
        own[:count] = pages[other][:count]
    return with_pages(batch, pages)


def with_pages(batch: PagedBatch, pages: list[list[int]]) -> PagedBatch:
    """The batch over other pages, with what its decodes share."""
    lengths = [kv for _, kv in batch.lens]
    table = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    decodes = sum(n == 1 for n, _ in batch.lens)
    found = shared_blocks.find(table[:decodes], np.array(lengths[:decodes]), batch.k_cache.shape[1])
    metadata = AttentionMetadata.build(
        [n for n, _ in batch.lens], lengths, pages, batch.k_cache.shape[1], torch.device(DEVICE), found
    )
    return replace(batch, pages=pages, metadata=metadata)


def alone(batch: PagedBatch) -> Tensor:
    """What the same decodes give that read everything themselves."""
    metadata = replace(batch.metadata, shared=None, plans={})
    return replace(batch, metadata=metadata).run(ALONE)


def check(batch: PagedBatch, *schedules: AttentionSchedule) -> None:
    """Equal bytes, twice as two layers would, and close to float64; and that anything was shared."""
    assert batch.metadata.shared is not None
    expected, truth = alone(batch), batch.truth()
    assert (expected.cpu().double() - truth).abs().max() <= TOLERANCE[batch.q.dtype] * max(1.0, truth.abs().max())
    for schedule in schedules or (CASCADE,):
        for _ in range(2):
            assert_bitwise_equal(batch.run(schedule), expected, str(schedule))


TREES = {
    # One page for two; a prime number of decodes; more than a tile of them; a page more than a block.
    "two": ([70, 66], [(0, 0), (0, 1)], 64),
    "primes": ([131, 67, 193, 129, 71], [(0, 0), (0, 1), (0, 2), (0, 2), (0, 1)], 64),
    "over a tile": ([65 + i % 3 for i in range(17)], [(0, 0), *[(0, 1)] * 16], 64),
    "pages of 16": ([150, 140, 100, 70], [(0, 0), (0, 8), (0, 5), (0, 3)], 16),
    "pages of 128": ([300, 290, 129], [(0, 0), (0, 2), (0, 1)], 128),
    "two families and one alone": ([130, 80, 140, 200, 70], [(0, 0), (0, 1), (2, 0), (2, 2), (4, 0)], 64),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (4, 2, 16)), (torch.float16, (7, 1, 20))], ids=str)
def test_equal_bytes_and_float64(tree: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Whatever tree the pages make, for groups of 2 and 7 heads, in one tile or several."""
    lengths, shares, page = TREES[tree]
    check(batch_of(lengths, shares, page, shape, dtype), CASCADE, replace(CASCADE, shared_rows=16))


def test_chunks_that_are_shared_whole_and_in_part() -> None:
    """A chunk of which nothing is a decode's own; one shared up to a block inside; one that is not; a later chunk that
    others share than the first one; and a decode that shares nothing."""
    lengths = [2 * CHUNK + 3, CHUNK + 130, CHUNK + 5, CHUNK, 70, 9]
    shares = [(0, 0), (0, 17), (0, 16), (0, 16), (0, 1), (5, 0)]
    batch = batch_of(lengths, shares, 64, (2, 1, 16), torch.float32)
    assert batch.metadata.shared is not None
    tokens = [[CHUNK, BLOCK, 0], [CHUNK, BLOCK, 0], [CHUNK, 0, 0], [CHUNK, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.metadata.shared.tokens.tolist() == tokens
    check(batch)


@pytest.mark.parametrize("variant", [{"softcap": 20.0}, {"sinks": True}, {"window": 61}], ids=str)
def test_variants(variant: dict[str, Any]) -> None:
    """Caps and sinks have their bytes too. With a window a decode reads all by itself, whatever is shared."""
    lengths, shares, page = TREES["primes"]
    batch = batch_of(lengths, [(i, 0) for i in range(5)] if "window" in variant else shares, page, (4, 2, 16),
                     torch.float32, **variant)  # fmt: skip
    if "window" not in variant:
        check(batch)
        return
    tokens = torch.full((5, 1), BLOCK, dtype=torch.int32)
    shared = SharedBlocks(tokens, tokens, tokens[:1, 0], tokens, most_tiles=1)
    wrong = replace(batch, metadata=replace(batch.metadata, shared=shared))
    assert_bitwise_equal(wrong.run(CASCADE), alone(batch))


def test_prompts_and_decodes_in_one_batch() -> None:
    batch = PagedBatch.random([(1, 70), (1, 131), (5, 70)], 4, 2, 16, 64, torch.float32)
    pages = [batch.pages[0], [batch.pages[0][0], *batch.pages[1][1:]], batch.pages[2]]
    check(with_pages(batch, pages))


def test_a_graph_reads_its_units_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid is laid out for more tiles than there are, or fewer programs; other units, written to the same memory,
    are read by the next launch, none among them, and rows of length 0 are padding."""
    lengths, shares, page = TREES["over a tile"]
    batch = batch_of(lengths, shares, page, (4, 2, 16), torch.float32)
    found = batch.metadata.shared
    assert found is not None and found.count.item() == 2
    expected = alone(batch)
    for most, programs in ((9, 512), (2, 1)):
        monkeypatch.setattr(attention_decode, "PROGRAMS", programs)
        wide = torch.full((17, 3), 77, dtype=torch.int32, device=DEVICE)
        wide[:, :1] = found.tokens
        shared = replace(found, most_tiles=most, tokens=wide)
        again = replace(batch, metadata=replace(batch.metadata, shared=shared, plans={}))
        assert_bitwise_equal(again.run(CASCADE), expected)
    found.count.zero_()
    found.tokens.zero_()
    batch.metadata.seqlens_k[11:] = 0
    assert_bitwise_equal(batch.run(CASCADE)[:11], expected[:11])


@pytest.mark.parametrize("fault", ["another order of blocks", "a rounded state", "a decode in the wrong unit"])
def test_the_comparison_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other arithmetic and other keys in the shared part are found."""
    lengths, shares, page = TREES["pages of 16"]
    batch = batch_of(lengths, shares, page, (4, 2, 16), torch.float32)
    expected = alone(batch)
    assert batch.metadata.shared is not None
    batch.metadata.plans.clear()
    if fault == "a decode in the wrong unit":
        others = [list(pages) for pages in batch.pages]
        others[1][0], others[1][1] = others[1][1], others[1][0]
        found = batch.metadata.shared
        batch = with_pages(batch, others)
        batch = replace(batch, metadata=replace(batch.metadata, shared=found, plans={}))
        expected = alone(batch)
    elif fault == "a rounded state":
        round_states(monkeypatch)
    else:
        real_launch = attention_decode.launch

        def in_halves(kernel: Any, grid: Any, args: tuple, constants: tuple, *rest: Any) -> Any:
            if kernel is attention_decode.shared_kernel:
                constants = (*constants[:5], 32, *constants[6:])
            return real_launch(kernel, grid, args, constants, *rest)

        monkeypatch.setattr(attention_decode, "launch", in_halves)
    assert count_differing(batch.run(CASCADE), expected) > 0


# -- which pages are shared -------------------------------------------------------------------------------------------


def units(table: list[list[int]], lengths: list[int], page: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """(chunk, shared tokens, decodes) of each tile."""
    width = max(map(len, table))
    found = shared_blocks.find(
        np.array([row + [0] * (width - len(row)) for row in table], dtype=np.int32), np.array(lengths), page
    )
    if found is None:
        return []
    return [(c, n, tuple(found.members[at : at + count].tolist())) for c, n, at, count in found.tiles.tolist()]


def test_pages_that_are_not_full_or_not_equal_are_not_shared() -> None:
    assert units([[1, 2], [1, 3]], [128, 128], 64) == [(0, 64, (0, 1))]
    assert units([[1, 2], [1, 3]], [63, 128], 64) == []  # no whole block before its end
    assert units([[1, 2], [3, 2]], [128, 128], 64) == []  # an equal page behind one that differs
    assert units([[1], [2]], [70, 70], 64) == [] and units([[1]], [70], 64) == []
    assert units([[1, 2, 3, 4, 5]] * 2, [79, 80], 16) == [(0, 64, (0, 1))]  # pages of a quarter of a block
    assert units([[1, 2, 3, 9, 5], [1, 2, 3, 4, 5]], [80, 80], 16) == []


def test_units_save_the_most_and_each_shares_all_that_it_has_in_common() -> None:
    table = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 5, 6, 7, 12], [1, 5, 6, 8, 13], [1, 5, 6, 8, 14]]
    # 2 x 4 pages for the first two, and 2 x 3 for the others, are more than 4 x 1 for all.
    assert units(table, [260] * 5, 64) == [(0, 256, (0, 1)), (0, 192, (2, 3, 4))]
    # Cut at the depth where three save the most, the first two still share their fourth page.
    assert units([[1, 2], [1, 3], [1, 4], [1, 5]], [100] * 4, 64) == [(0, 64, (0, 1, 2, 3))]


def test_a_page_in_two_chunks_cannot_be_shared() -> None:
    assert [page for page in (1, 5, 16, 48, 64, 256, 1024, 2048) if not shared_blocks.serves(page)] == [5, 48, 2048]


def test_no_more_tiles_and_members_than_a_graph_has_room_for() -> None:
    """For random trees of any number of decodes: `decode_inputs` gives them half as many tiles a chunk as decodes."""
    generator = np.random.default_rng(0)
    for decodes in (1, 2, 3, 17, 33, 64):
        table = generator.integers(0, 3, (decodes, 32)).astype(np.int32)
        lengths = generator.integers(1, 2048, decodes)
        found = shared_blocks.find(table, lengths, 64)
        if found is not None:
            assert len(found.tiles) <= 2 * (decodes // 2) and len(found.members) <= 2 * decodes
            at = [tuple(row) for c, _, first, n in found.tiles for row in
                  ((c, m) for m in found.members[first : first + n])]  # fmt: skip
            assert len(set(at)) == len(at)  # a decode is in one unit of a chunk
            saved = sum(n * count for _, n, _, count in found.tiles.tolist())
            firsts = {(c, int(table[m, c * 16])) for c, m in at}
            assert 0 < found.saved < saved and firsts


# -- on the GPU --------------------------------------------------------------------------------------------------------

SHAPES = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 96), (4, 1, 48), (8, 1, 256), (71, 1, 64), (28, 4, 128)]
SCHEDULES = [
    *(replace(CASCADE, shared_rows=m, shared_warps=w, shared_stages=s) for m, w, s in
      ((16, 4, 1), (32, 4, 2), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 2))),
    replace(CASCADE, decode_warps=8, decode_stages=1, shared_rows=64),
]  # fmt: skip


def long_batch(shape: tuple[int, int, int], dtype: torch.dtype, page: int) -> PagedBatch:
    """61 decodes on one prefix of 1,984 tokens, of which the last ones leave it earlier."""
    lengths = [2000 + 17 * i % 900 for i in range(53)] + [1100, 1024, 1025, 1090, 700, 640, 65, 1]
    whole = [min(n, 1984) // max(page, BLOCK) * max(page, BLOCK) // page for n in lengths]
    return batch_of(lengths, [(0, 0), *((0, n) for n in whole[1:])], page, shape, dtype, spread=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(SHAPES), ids=str)
@pytest.mark.parametrize("page", [16, 64, 256])
def test_every_schedule_gives_the_same_bytes(shape: tuple[int, int, int], dtype: torch.dtype, page: int) -> None:
    batch = long_batch(shape, dtype, page)
    fits = [s for s in SCHEDULES if shape[2] <= 128 or (s.shared_rows <= 32 and s.decode_stages < 2)]
    check(batch, *fits)
    assert_bitwise_equal(batch.run(), alone(batch), "the schedule that is chosen")
    assert_bitwise_equal(replace(batch, metadata=replace(batch.metadata, plans={})).run(REFERENCE), alone(batch))


@pytest.mark.gpu
def test_float32_and_other_rounding_points() -> None:
    batch = long_batch((8, 2, 64), torch.float32, 64)
    assert_bitwise_equal(batch.run(), alone(batch))
    monkey = long_batch((8, 2, 64), torch.bfloat16, 64)
    expected = alone(monkey)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 32)
        assert count_differing(monkey.run(CASCADE), expected) > 0
