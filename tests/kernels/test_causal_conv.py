"""Convolutions: near the float64 reference, the same bytes wherever a step ends, and a ring that drops last tokens.

Each level's function is called with (operands [T, ...], the pool of rings, query_lens, kv_lens, slots).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from evalengine.kernels import causal_conv, exact_recurrent
from evalengine.kernels.recurrent_variant import most_dropped, ring_rows
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.test_recurrent import (
    DEVICE,
    LENGTHS,
    LEVELS,
    Layer,
    State,
    assert_borders_do_not_matter,
    assert_may_start_elsewhere,
    on_device,
    randn,
)
from tests.references import reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def conv(
    level: str, weight: Tensor, bias: Tensor | None, silu: bool, start_slots: Sequence[int] | None = None
) -> Layer:
    def run(operands: list[Tensor], state: State, new: list[int], total: list[int], slots: list[int]) -> Tensor:
        if level == "exact":
            return exact_recurrent.causal_conv(*operands, weight, bias, *state, new, total, slots, silu=silu)
        step = on_device(new, total, slots)
        starts = None if start_slots is None else torch.tensor(start_slots, dtype=torch.int32, device=DEVICE)
        return causal_conv.causal_conv(*operands, weight, bias, *state, *step, max(new), starts, silu=silu)

    return run


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("channels", "taps"), [(1, 2), (129, 3), (40, 4), (128, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_may_end_anywhere(dtype: torch.dtype, channels: int, taps: int, level: str) -> None:
    weight, bias = randn(channels, taps, seed=1, dtype=dtype), randn(channels, seed=2, dtype=dtype)
    state = torch.full((6, ring_rows(taps), channels), float("nan"), dtype=dtype, device=DEVICE)
    run = conv(level, weight, bias if taps > 3 else None, silu=taps != 3)
    assert_borders_do_not_matter(run, [randn(sum(LENGTHS), channels, dtype=dtype)], (state,))


@pytest.mark.parametrize(("before", "taps"), [(1, 4), (13, 4), (97, 7)])
def test_convolutions_may_begin_in_another_slot(before: int, taps: int) -> None:
    weight, state = randn(40, taps, seed=1), torch.full((6, ring_rows(taps), 40), float("nan"), device=DEVICE)
    run = partial(conv, "native", weight, None, True)
    assert_may_start_elsewhere(run, [randn(before + 130, 40)], (state,), before)


def ring(inputs: Tensor, end: int, rows: int = 16) -> Tensor:
    """[n, C] -> [rows, C]: a sequence's inputs up to position `end`, and NaN in the rows of others."""
    result = torch.full((rows, inputs.shape[1]), float("nan"), device=DEVICE)
    result[torch.arange(end - len(inputs), end, device=DEVICE) % rows] = inputs
    return result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("begin", [0, 1, 2, 3, 13])
def test_a_convolution_is_near_the_reference(begin: int, level: str) -> None:
    """Inputs before position 0 are zeros, whatever the ring holds. The weights are in the layout of loaded models."""
    x, weight, bias = randn(67, 40), randn(4, 40, seed=1).t(), randn(40, seed=2)
    before = randn(3, 40, seed=3)
    before[: max(0, 3 - begin)] = 0
    state = ring(before[max(0, 3 - begin) :], begin)[None]
    true = reference.causal_conv(x, weight, bias, before, silu=True)
    out = conv(level, weight, bias, silu=True)([x], (state,), [67], [begin + 67], [0])
    torch.testing.assert_close(out.double(), true, rtol=2e-6, atol=2e-6)
    assert_bitwise_equal(state[0, torch.arange(begin + 64, begin + 67) % 16], x[-3:])


@pytest.mark.parametrize("tokens", [1, 11, 47])
def test_a_convolution_finds_its_sequence_among_many(tokens: int) -> None:
    """More than the 32 ways of the search: two are padding, whose outputs are 0, one has no token. No other row of the
    pool is written."""
    lengths = [0 if i == 7 else 1 + i * i % tokens for i in range(37)]
    weight, x, before = randn(3, 4, seed=1), randn(sum(lengths), 3), randn(40, 3, 3, seed=3)
    slots = [-1 if i in (5, 36) else (7 * i + 2) % 40 for i in range(37)]
    state = torch.stack([ring(inputs, 9) for inputs in before])
    old = state.clone()
    out = conv("native", weight, None, silu=False)([x], (state,), lengths, [n + 9 for n in lengths], slots)
    for rows, own, slot in zip(x.split(lengths), out.split(lengths), slots, strict=True):
        if slot < 0:
            assert_bitwise_equal(own, torch.zeros_like(own))
            continue
        true = reference.causal_conv(rows, weight, None, before[slot], silu=False)
        torch.testing.assert_close(own.double(), true, rtol=2e-6, atol=2e-6)
        written = rows if len(rows) <= 13 else rows[-3:]
        places = torch.arange(9 + len(rows) - len(written), 9 + len(rows)) % 16
        old[slot, places] = written
    assert_bitwise_equal(state, old)


def dropped(level: str, taps: int, guesses: int) -> list[tuple[int, int]]:
    """Steps with so many guesses, (position, right guesses), after which the next step's bytes differ from those of a
    run without guesses, or whose own bytes differ when they run again."""
    weight = randn(33, taps, seed=1)
    run, right, wrong = conv(level, weight, None, silu=True), randn(80, 33), randn(40, 33, seed=2)
    found = []
    for begin in (1, 13):
        state = torch.full((1, ring_rows(taps), 33), float("nan"), device=DEVICE)
        run([right[:begin]], (state,), [begin], [begin], [0])
        for accepted in (0, guesses // 2):
            guessed, plain = state.clone(), state.clone()
            stays = begin + 1 + accepted
            x = torch.cat([right[begin:stays], wrong[: guesses - accepted]])
            first = run([x], (guessed,), [len(x)], [begin + len(x)], [0])
            again = run([x], (guessed,), [len(x)], [begin + len(x)], [0])
            run([right[begin:stays]], (plain,), [1 + accepted], [stays], [0])
            steps = [run([right[stays : stays + 2]], (own,), [2], [stays + 2], [0]) for own in (guessed, plain)]
            if count_differing(*steps) or count_differing(first, again):
                found.append((begin, accepted))
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("taps", [2, 4, 9])
def test_a_step_of_a_convolution_may_drop_its_last_tokens_and_may_run_again(taps: int, level: str) -> None:
    assert dropped(level, taps, most_dropped(taps)) == dropped(level, taps, 2) == []
    assert dropped(level, taps, most_dropped(taps) + 2), "the control: a ring too short"
