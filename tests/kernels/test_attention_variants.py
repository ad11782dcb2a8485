"""`native` attention with windows, softcaps and sinks: right to a rounding, and the same bytes under every schedule."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from evalengine.kernels import attention
from evalengine.kernels.attention import BLOCK, CHUNK, REFERENCE
from evalengine.kernels.attention_batch import AttentionSchedule
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.paged_batch import DEVICE, PagedBatch
from tests.kernels.test_attention import MIXED, assert_close

# Rows that pad a tile see no key, or stale ones, which are NaN here; their results are never stored.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
ALWAYS = 1 << 30
VARIANTS: list[dict[str, Any]] = [
    *({"window": window} for window in (1, 7, 61, BLOCK - 1, BLOCK, BLOCK + 1, 5000)),
    *({"softcap": cap} for cap in (2.0, 30.0, 50.0)),
    {"sinks": True},
    {"window": 33, "softcap": 30.0, "sinks": True},
]
BY_BLOCK = AttentionSchedule(16, 4, 1, by_block_max=ALWAYS)
BY_CHUNK = AttentionSchedule(32, 4, 2, by_block_max=0, tma=False)


def name(variant: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in variant.items())


@pytest.mark.parametrize(
    "variant",
    # A window of 61 repeats that of 63, and caps of 30 and 50 repeat that of 2, which bends scores most.
    [pytest.param(v, marks=pytest.mark.slow if v in (VARIANTS[2], *VARIANTS[8:10]) else ()) for v in VARIANTS],
    ids=name,
)
def test_a_mixed_batch_is_float64s_within_rounding(variant: dict[str, Any]) -> None:
    """Whatever stands before every window is NaN in the pool, as after the sequences' ends."""
    for dtype, head_dim in ((torch.float32, 16), (torch.float16, 20)):
        batch = PagedBatch.random(MIXED, 4, 2, head_dim, 16, dtype, spread=2.0, **variant)
        for schedule in (BY_BLOCK, BY_CHUNK):
            assert_close(batch, schedule)


@pytest.mark.parametrize("window", [CHUNK - 1, CHUNK, CHUNK + 1, 1031, 1])
def test_windows_at_a_chunks_border(window: int) -> None:
    """Windows that begin inside the first chunk, at its end, and in the second one; sinks come after the last chunk."""
    lens = [(1, CHUNK), (1, CHUNK + 1), (1, 2 * CHUNK + 3), (3, CHUNK + BLOCK + 1)]
    batch = PagedBatch.random(lens, 2, 1, 16, 64, torch.float32, window=window, sinks=True)
    for schedule in (BY_BLOCK, BY_CHUNK):
        assert_close(batch, schedule)


@pytest.mark.parametrize("variant", [VARIANTS[1], VARIANTS[3], VARIANTS[-1]], ids=name)
def test_prefill_chunks_decode_and_pages_give_the_same_bytes(variant: dict[str, Any]) -> None:
    """Rows have the same bytes in a whole prompt, in pieces of it and as decodes, alone or together, on any page size
    and in tiles of any number of rows; and with a window moved by one token they have others."""
    lens = [(131, 131), (20, 70)]
    expected = PagedBatch.random(lens, 4, 2, 16, 16, torch.float16, **variant).run(REFERENCE)
    for page in (5, 64):
        batch = PagedBatch.random(lens, 4, 2, 16, page, torch.float16, **variant)
        for schedule in (BY_CHUNK, AttentionSchedule(64, 4, 2)):
            assert_bitwise_equal(batch.run(schedule), expected, f"page {page}, {schedule}")
        pieces = [(0, 0, 1), (0, 30, 31), (0, 64, 65), (1, 69, 70), (0, 5, 69), (1, 50, 53), (0, 100, 131)]
        rows = torch.cat([torch.arange(a, b) - (50 if s else 0) + (131 if s else 0) for s, a, b in pieces])
        for schedule in (BY_BLOCK, BY_CHUNK):
            assert_bitwise_equal(batch.part(pieces).run(schedule), expected[rows.to(DEVICE)], f"pieces, page {page}")
    other = {**variant, "window": variant.get("window", 60) + 1}
    moved = PagedBatch.random(lens, 4, 2, 16, 16, torch.float16, **other).run(REFERENCE)
    assert_bitwise_equal(moved[0], expected[0])  # A first token sees itself alone, so the operands are the same ones.
    assert count_differing(moved, expected) > 0


@pytest.mark.parametrize("schedule", [BY_BLOCK, BY_CHUNK, REFERENCE])
def test_chunks_and_blocks_are_not_counted_from_the_window(
    schedule: AttentionSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode equals that row of a prefill whose first rows' windows begin elsewhere; chunks of another size, which
    end elsewhere in the window, give other bytes."""
    batch = PagedBatch.random([(300, 450)], 2, 1, 16, 64, torch.float32, window=150, spread=2.0)
    monkeypatch.setattr(attention, "CHUNK", 128)
    expected = batch.run(AttentionSchedule(64, 4, 1))[-1:]
    assert_bitwise_equal(batch.part([(0, 449, 450)]).run(schedule), expected)
    monkeypatch.setattr(attention, "CHUNK", 64)
    assert count_differing(batch.part([(0, 449, 450)]).run(schedule), expected) > 0


def test_a_window_wider_than_the_context_is_none() -> None:
    plain, windowed = (PagedBatch.random(MIXED, 2, 1, 16, 16, torch.float16, **form) for form in ({}, {"window": 131}))
    for schedule in (BY_BLOCK, BY_CHUNK):
        assert_bitwise_equal(windowed.run(schedule), plain.run(schedule))


@pytest.mark.parametrize(("window", "chunks", "blocks"), [(4096, 5, 65), (4097, 5, 65), (1, 1, 1), (None, 32, 512)])
def test_a_decode_launches_no_more_than_its_window_needs(
    window: int | None, chunks: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 32k tokens with a window has the programs of a context as long as the window (and one more, since a
    window begins anywhere in a chunk)."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(attention, "launch", lambda kernel, grid, *rest: grids.append(grid))
    batch = PagedBatch.random([(1, 32768), (1, 5)], 2, 1, 16, 64, torch.float16, window=window)
    for schedule in (BY_CHUNK, BY_BLOCK):
        batch.run(schedule)
    assert grids == [(1, 2, chunks), (1, blocks, 2), (1, 2, chunks)]


def test_sinks_take_weight_and_give_no_value() -> None:
    """A sink of -inf changes no bit, a huge one leaves nothing, and a NaN reaches its own head alone."""
    lens = [(1, 70), (5, 5)]
    plain = PagedBatch.random(lens, 3, 1, 16, 16, torch.float32)
    batch = PagedBatch.random(lens, 3, 1, 16, 16, torch.float32, sinks=True)
    batch.sinks = torch.tensor([float("-inf"), 1e4, float("nan")], device=DEVICE)
    for schedule in (BY_BLOCK, BY_CHUNK):
        out = batch.run(schedule)
        assert_bitwise_equal(out[:, 0], plain.run(schedule)[:, 0])
        assert_bitwise_equal(out[:, 1], torch.zeros_like(out[:, 1]))
        assert out[:, 2].isnan().all()


# -- on the GPU -------------------------------------------------------------------------------------------------------

FREE = [
    *(AttentionSchedule(m, w, s) for m, w, s in ((16, 4, 3), (32, 4, 2), (64, 4, 2), (64, 8, 2), (128, 8, 3))),
    AttentionSchedule(64, 4, 2, tma=False, by_block_max=0),
    AttentionSchedule(16, 4, 1, decode_warps=2, extra_stage_max=ALWAYS, by_block_max=0),
    AttentionSchedule(16, 4, 1, by_block_max=ALWAYS),
    AttentionSchedule(128, 8, 3, hopper=True),
]
LONG = [(1, 1), (1, 1023), (1, 1024), (1, 1025), (1, 2500), (1, 777), (1500, 1500), (13, 1037), (257, 2049), (64, 64)]
GPU_VARIANTS: list[dict[str, Any]] = [
    *({"window": window} for window in (1, 61, 128, 509, 1023, 1024, 1025, 4096)),
    {"softcap": 50.0},
    {"sinks": True},
    {"window": 128, "sinks": True},
    {"window": 600, "softcap": 30.0, "sinks": True},
]


# A window is a constant of the kernels, so that each is compiled anew: a quick run has all of them for one shape only.
QUICK = [GPU_VARIANTS[1], GPU_VARIANTS[5], *GPU_VARIANTS[8:10], GPU_VARIANTS[-1]]
GPU_CASES = [
    pytest.param(shape, variant, marks=[] if shape[2] == 128 or variant in QUICK else pytest.mark.slow,
                 id=f"{shape}-{name(variant)}")
    for shape, variant in product([(32, 8, 128), (8, 1, 64), (8, 4, 256), (14, 2, 96)], GPU_VARIANTS)
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "variant"), GPU_CASES)
def test_every_schedule_gives_the_same_bytes(shape: tuple[int, int, int], variant: dict[str, Any]) -> None:
    head_dim = shape[2]
    batch = PagedBatch.random(LONG, *shape, 64, torch.bfloat16, spread=2.0, **variant)
    assert_close(batch)
    expected = batch.run(REFERENCE)
    for schedule in FREE:
        if head_dim == 256 and (schedule.block_m == 128 or schedule.decode_stages > 2):
            continue  # does not fit in shared memory
        assert_bitwise_equal(batch.run(schedule), expected, f"{schedule}")
    assert_bitwise_equal(batch.run(), expected, "as chosen")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [GPU_VARIANTS[2], GPU_VARIANTS[4], GPU_VARIANTS[-1]], ids=name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [16, 48, 256])
def test_rows_have_the_same_bytes_in_pieces_and_on_other_pages(
    page: int, dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    lens = [(1500, 1500), (777, 777), (2100, 2100)]
    starts = [0, 1500, 2277]
    expected = PagedBatch.random(lens, 8, 2, 64, 64, dtype, **variant).run()
    whole = PagedBatch.random(lens, 8, 2, 64, page, dtype, **variant)
    assert_bitwise_equal(whole.run(), expected, f"page {page}")
    decodes = [(2, p, p + 1) for p in (0, 62, 64, 599, 600, 1023, 1024, 1025, 1151, 1152, 2047, 2048, 2099)]
    pieces = [(0, 1000, 1500), (0, 1499, 1500), (1, 3, 400), (2, 1020, 1030), (2, 1024, 2048)]
    for which in (decodes, pieces, [*decodes, *pieces]):
        which = sorted(which, key=lambda piece: piece[2] - piece[1] > 1)
        rows = torch.cat([torch.arange(a, b) + starts[s] for s, a, b in which]).to(DEVICE)
        assert_bitwise_equal(whole.part(which).run(), expected[rows], f"page {page}, pieces")


@pytest.mark.gpu
def test_layers_with_sinks_of_their_own_share_a_plan() -> None:
    """The second layer repeats the first one's launches, with its own sinks."""
    batch = PagedBatch.random([(1, 1200), (40, 1100)], 8, 2, 64, 64, torch.bfloat16, sinks=True)
    assert batch.sinks is not None
    first = batch.run()
    own = batch.sinks
    batch.sinks = own + 2
    repeated = batch.run()
    assert count_differing(repeated, first) > 0
    batch.metadata.plans.clear()
    assert_bitwise_equal(batch.run(), repeated)
    batch.sinks = own
    assert_bitwise_equal(batch.run(), first)


@pytest.mark.gpu
def test_what_lies_before_the_windows_changes_nothing() -> None:
    lens = [(1, 1200), (300, 1300), (40, 40)]
    batch = PagedBatch.random(lens, 16, 8, 128, 64, torch.bfloat16, window=100)
    for stale in (0.0, float("inf"), 3e38):
        again = PagedBatch.random(lens, 16, 8, 128, 64, torch.bfloat16, stale=stale, window=100)
        assert_bitwise_equal(again.run(), batch.run(), f"stale slots hold {stale}")
