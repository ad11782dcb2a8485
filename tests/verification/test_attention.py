"""`verify` of attention: how much is compared, and that a difference anywhere in it is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from evalengine.kernels import attention
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.verification.comparisons import verify_attention
from evalengine.verification.verdict import KernelsVerdict
from tests.verification.verify_double import DEVICE, GPU
from tests.verification.verify_double import alone as alone  # The fixture is used by every test here.

# The numbers of new tokens and of all tokens of each sequence; all are short.
SHORT = ((1, 1), (1, 70), (1, 1030), (3, 3), (5, 67))


def check_attention(page_size: int = 16, **variant: Any) -> KernelsVerdict:
    """The verdict on the attention of the sequences in SHORT, in pages of `page_size`; variant: what it has beside the
    scale."""
    verdict = KernelsVerdict()
    verify_attention(verdict, 2, 1, 16, page_size, torch.float32, DEVICE, AttentionVariant(0.25, **variant), SHORT)
    return verdict


# Pages of 16 tokens stay quick in the planted faults below, each of which has such pages.
@pytest.mark.parametrize("page_size", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_attention_passes(page_size: int) -> None:
    """Attention as it is has no failure, and on a GPU no schedule is dropped."""
    verdict = check_attention(page_size)
    assert not verdict.failed and verdict.checked == 2 * len(verdict.schedules) + 1
    if GPU:  # The interpreter's dot products are numpy's, whose order follows the tile.
        assert not verdict.dropped


def test_attention_with_a_window_passes_and_is_compared_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the window, some sequences are longer: a decode's and a chunk's. What is planted there is found."""
    real, window = attention.paged_attention, 40

    def paged_attention(*args: Any) -> Tensor:
        seen.extend(zip(args[2].query_lens, args[2].kv_lens, strict=True))
        out = real(*args[:5], attention.REFERENCE)  # In the interpreter other schedules may differ.
        if args[5].by_block_max > 0 and planted:
            out[args[2].num_decodes - 1] += 1  # the decode that is longer than the window is the last one
        return out

    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    for planted in (False, True):
        seen: list[tuple[int, int]] = []
        verdict = check_attention(window=window, softcap=30.0, sinks=True)
        assert not verdict.failed and bool(verdict.dropped) == planted
        assert {rows for rows, length in seen if length > window and length - rows + 1 > window - 1} >= {1, 67}
    assert all("window 40, softcap 30.0, sinks" in drop["where"] for drop in verdict.dropped)


@pytest.mark.parametrize("merged", [True, False])
def test_a_decode_wrong_only_if_chunks_are_merged_or_only_if_not_is_dropped(
    merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of short decodes has a kernel that leaves the result; the other kernel leaves a state to be merged."""
    real, reference = attention.paged_attention, attention.REFERENCE

    def paged_attention(*args: Any) -> Tensor:
        batch, schedule = args[2], args[5]
        if schedule.by_block_max > 0 and (batch.max_decode_kv_len > attention.CHUNK) == merged:
            return real(*args) + 1
        return real(*args[:5], reference)  # In the interpreter other schedules differ.

    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    verdict = check_attention()
    assert {drop["schedule"]["by_block_max"] > 0 for drop in verdict.dropped} == {True} and not verdict.failed
    assert verdict.checked == 2 * len(verdict.schedules) + 1


def test_a_reference_that_does_not_fit_the_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def paged_attention(*args: Any) -> Tensor:
        raise OutOfResources(147_456, 101_376, "shared memory")

    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    verdict = check_attention()
    (failed,) = verdict.failed
    assert "the reference schedule does not fit on this GPU" in failed and "147456" in failed


def test_decode_that_differs_from_prefill_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention.paged_attention

    def paged_attention(*args: Any) -> Tensor:
        out = real(*args)
        return out if args[2].num_decodes else out + 2**-12  # args[2] is the batch.

    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    (failed,) = check_attention().failed
    assert failed.startswith("attention, decode against prefill") and "elements differ" in failed
