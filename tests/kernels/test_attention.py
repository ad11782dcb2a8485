"""`native` attention is right to a rounding, and has the same bytes however rows are tiled, split, paged or chunked."""

from __future__ import annotations

import dataclasses
import random
from itertools import product
from typing import Any

import pytest
import torch

from evalengine.kernels import attention
from evalengine.kernels.attention import BLOCK, CHUNK, REFERENCE
from evalengine.kernels.attention_batch import AttentionSchedule
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.paged_batch import PagedBatch

# Rows that pad a tile read stale slots, which are NaN here; their results are never stored.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
# Errors allowed, relative to the largest output: the result's rounding, p's to the KV dtype, and float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
MIXED = [(1, 1), (1, 65), (1, 131), (7, 7), (5, 70), (64, 64), (3, 129)]


def assert_close(batch: PagedBatch, schedule: AttentionSchedule | None = None) -> None:
    out, truth = batch.run(schedule).cpu().double(), batch.truth()
    assert out.isfinite().all(), "a stale slot reached the output"
    assert (out - truth).abs().max() <= TOLERANCE[batch.q.dtype] * max(1.0, truth.abs().max().item())


SMALL = [  # (dtype, heads, kv_heads, head_dim, page)
    (torch.float32, 4, 2, 16, 16),
    (torch.float16, 3, 3, 64, 64),
    (torch.float16, 6, 1, 48, 16),
    (torch.float32, 2, 1, 20, 5),
]


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "page"), SMALL)
def test_mixed_batch_against_float64(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int) -> None:
    """Prefills and decodes in one batch are close to float64, for every dtype and shape in SMALL."""
    assert_close(PagedBatch.random(MIXED, heads, kv_heads, head_dim, page, dtype))


@pytest.mark.parametrize(
    "schedule", [REFERENCE, AttentionSchedule(32, 4, 2), AttentionSchedule(64, 4, 2, by_block_max=1 << 30)]
)
def test_schedules_and_tensor_descriptors(schedule: AttentionSchedule) -> None:
    """Large tiles by tensor descriptors, in several stages, are close to float64."""
    assert_close(PagedBatch.random([(1, 70), (70, 70)], 2, 1, 64, 64, torch.float16), schedule)


def test_more_than_a_chunk() -> None:
    """Two chunks are merged in registers (prefill) and by the last program (decode), beside a one-chunk sequence."""
    batch = PagedBatch.random([(1, CHUNK + 3), (1, 5), (2, CHUNK + BLOCK + 1)], 2, 1, 16, 64, torch.float32)
    for by_block in (0, 1 << 30):
        assert_close(batch, AttentionSchedule(16, 4, 1, by_block_max=by_block))


def test_pools_that_lie_at_a_stride_give_the_same_bytes() -> None:
    """As where layers' heads differ in size: a token's keys and values stand among those of other layers."""
    batch = PagedBatch.random(MIXED, 4, 2, 32, 16, torch.float32)
    expected = batch.run()
    pool = torch.full((*batch.k_cache.shape[:2], 7 * 64), float("nan"), device=batch.q.device)
    caches = [pool[..., at : at + 64].unflatten(-1, (2, 32)) for at in (128, 192)]
    for cache, own in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
        cache.copy_(own)
    assert_bitwise_equal(dataclasses.replace(batch, k_cache=caches[0], v_cache=caches[1]).run(), expected, "strided")


@pytest.mark.parametrize("by_block", [0, 1 << 30])
def test_arrivals_are_counted_anew_in_every_layer(by_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a step share the count of chunks that have come, so each launch leaves it at 0."""
    counts: list[torch.Tensor] = []
    real = attention.Call._arrivals

    def arrivals(self: attention.Call, programs: int, chunks: int) -> torch.Tensor:
        counts.append(real(self, programs, chunks))
        return counts[-1]

    monkeypatch.setattr(attention.Call, "_arrivals", arrivals)
    batch = PagedBatch.random([(1, CHUNK + 3), (1, 5), (1, 2 * CHUNK + 1)], 2, 1, 16, 64, torch.float32)
    schedule = AttentionSchedule(16, 4, 1, by_block_max=by_block)
    first = batch.run(schedule)
    for _ in range(2):
        assert_bitwise_equal(batch.run(schedule), first)
    assert counts and all(len(count) and not count.any() for count in counts)


@pytest.mark.parametrize("by_block", [0, 1 << 30])
@pytest.mark.parametrize("kv_len", [40, 64])
def test_an_infinite_query_gives_nan_in_every_form(kv_len: int, by_block: int) -> None:
    """A row whose scores are all -inf gives NaN; no form may take it for a row without keys, whose output is 0."""
    for lens in ([(1, kv_len)], [(2, kv_len)]):
        batch = PagedBatch.random(lens, 2, 1, 16, 16, torch.float32)
        batch.k_cache[..., 0] = -batch.k_cache[..., 0].abs() - 1
        batch.q[-1, 0, 0] = float("inf")
        out = batch.run(AttentionSchedule(16, 4, 1, by_block_max=by_block))
        assert out[-1, 0].isnan().all() and out[-1, 1].isfinite().all()


def test_a_schedule_whose_decode_is_excluded_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule with a form in `excluded` is never chosen, and the reference takes its place."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    schedule = attention.choose(64, torch.float16, 64, 64, device)
    assert schedule != REFERENCE
    for form in attention.schedules(64, 64, torch.float16, device)[1:]:
        monkeypatch.setattr(attention, "excluded", {form})
        chosen = [attention.choose(64, torch.float16, 64, rows, device) for rows in (16, 32, 64)]
        assert REFERENCE in chosen and form not in chosen


def test_nothing_to_do() -> None:
    """A batch without queries gives an empty output."""
    batch = PagedBatch.random([(0, 3)], 2, 1, 16, 16, torch.float32)
    assert batch.run().shape == (0, 2, 16)


def test_uncovered_dtypes_and_head_dims_are_refused() -> None:
    batch = PagedBatch.random([(1, 3)], 2, 1, 16, 16, torch.float32)
    for change in ({"q": batch.q.double()}, {"q": batch.q[..., :8], "k_cache": batch.k_cache[..., :8]}):
        with pytest.raises(ValueError, match=r"attention takes"):
            dataclasses.replace(batch, **change).run()


# -- equal bytes, on the GPU ------------------------------------------------------------------------------------------

FREE = [  # schedules that must give the reference's bytes
    *(
        AttentionSchedule(m, w, s)
        for m, w, s in ((16, 4, 3), (16, 1, 2), (32, 4, 2), (32, 2, 3), (64, 4, 2), (64, 4, 3))
    ),
    *(AttentionSchedule(m, w, s) for m, w, s in ((64, 8, 2), (128, 8, 2), (128, 4, 1))),
    AttentionSchedule(64, 4, 2, tma=False),
    AttentionSchedule(128, 8, 3, decode_warps=8, decode_stages=2, tma=False, by_block_max=0),
    AttentionSchedule(16, 4, 1, decode_warps=1, decode_stages=4, by_block_max=0),
    AttentionSchedule(16, 4, 1, decode_warps=2, decode_stages=2, extra_stage_max=1 << 30, by_block_max=0),
    AttentionSchedule(16, 4, 1, decode_warps=2, by_block_max=1 << 30),
    AttentionSchedule(16, 4, 1, decode_warps=4, by_block_max=1 << 30),
    AttentionSchedule(128, 8, 3, hopper=True),
]
SHAPES = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 8, 64), (14, 2, 96), (4, 1, 48), (8, 1, 256), (71, 1, 64)]
LONG = [(1, 1), (1, 1023), (1, 1024), (1, 1025), (1, 2500), (1, 777), (1500, 1500), (13, 1037), (257, 2049), (64, 64)]


def with_dtypes(shapes: list[tuple[int, int, int]]) -> list[Any]:
    """Each shape in bfloat16, and in float16, of which one group of two heads and one of three run in a quick run.

    A schedule is compiled anew for each of them, which takes most of a test's time."""
    quick = [(16, 8, 128), (9, 3, 64)]
    return [
        pytest.param(shape, dtype, marks=[] if dtype == torch.bfloat16 or shape in quick else pytest.mark.slow)
        for shape, dtype in product(shapes, (torch.bfloat16, torch.float16))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(SHAPES), ids=str)
def test_every_schedule_gives_the_same_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every schedule that covers the shape has the reference schedule's bytes, and so has the one that is chosen."""
    head_dim = shape[2]
    batch = PagedBatch.random(LONG, *shape, 64, dtype, spread=2.0)
    assert_close(batch)
    expected = batch.run(REFERENCE)
    for schedule in FREE:
        if head_dim == 256 and (schedule.block_m == 128 or schedule.decode_stages > 2):
            continue  # does not fit in shared memory
        if schedule.hopper and not (attention._hopper_covers(dtype, head_dim, 64, batch.q.get_device())):
            continue
        assert_bitwise_equal(batch.run(schedule), expected, f"{schedule}")
    assert_bitwise_equal(batch.run(), expected, "as chosen")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [16, 64, 256, 48])
def test_prefill_chunks_decode_and_pages_give_the_same_bytes(page: int, dtype: torch.dtype) -> None:
    """Rows have the same bytes in whole prompts, in pieces that end anywhere, and as decodes, on any page size."""
    lens = [(1500, 1500), (777, 777), (64, 64), (1, 1), (2100, 2100)]
    first = PagedBatch.random(lens, 8, 2, 64, 64, dtype)
    whole = PagedBatch.random(lens, 8, 2, 64, page, dtype)
    expected = first.run()
    assert_bitwise_equal(whole.run(), expected, f"page {page}")
    starts = [0, 1500, 2277, 2341, 2342]
    rng = random.Random(7)
    pieces = [(0, 1000, 1500), (0, 1499, 1500), (1, 3, 400), (1, 512, 777), (4, 1020, 1030), (4, 1024, 2048)]
    pieces += [(s, a, min(a + rng.randint(1, 90), lens[s][1])) for s in (0, 1, 4) for a in rng.sample(range(770), 5)]
    decodes = [(s, p, p + 1) for s in (0, 1, 4) for p in rng.sample(range(lens[s][1]), 40)]
    decodes += [(4, p, p + 1) for p in (0, 62, 63, 64, 1022, 1023, 1024, 1025, 2047, 2048, 2099)]
    mixed = sorted([*pieces, *decodes], key=lambda piece: piece[2] - piece[1] > 1)
    for which in (pieces, decodes, mixed):
        out = whole.part(which).run()
        rows = torch.cat([torch.arange(a, b) + starts[s] for s, a, b in which]).to(out.device)
        assert_bitwise_equal(out, expected[rows], f"page {page}, pieces")


@pytest.mark.gpu
def test_neighbours_and_stale_pages_change_nothing() -> None:
    """A sequence has the same bytes alone and in a batch, whatever the unused slots hold."""
    lens = [(1, 1200), (300, 1300), (40, 40)]
    batch = PagedBatch.random(lens, 16, 8, 128, 64, torch.bfloat16)
    alone = [batch.part([(s, kv - n, kv)]).run() for s, (n, kv) in enumerate(lens)]
    assert_bitwise_equal(batch.run(), torch.cat(alone), "alone")
    for stale in (0.0, float("inf"), 3e38):
        again = PagedBatch.random(lens, 16, 8, 128, 64, torch.bfloat16, stale=stale)
        assert_bitwise_equal(again.run(), batch.run(), f"stale slots hold {stale}")


@pytest.mark.gpu
def test_other_chunks_and_blocks_do_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: another CHUNK or BLOCK is other arithmetic, and gives other bytes."""
    batch = PagedBatch.random([(300, 1500)], 8, 2, 128, 64, torch.bfloat16)
    expected = batch.run()
    monkeypatch.setattr(attention, "CHUNK", 512)
    batch.metadata.plans.clear()  # the plans hold the first run's launches
    assert count_differing(batch.run(), expected) > 0
    monkeypatch.setattr(attention, "CHUNK", 1024)
    monkeypatch.setattr(attention, "BLOCK", 32)  # the Hopper form does not read this BLOCK
    assert count_differing(batch.run(AttentionSchedule(64, 4, 2)), expected) > 0
