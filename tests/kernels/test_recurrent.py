"""Recurrences and gated norms: near the float64 reference, and the same bytes wherever a step ends.

Each level's function is called with (operands [T, ...], the pools of states, query_lens, kv_lens, slots).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measure import run_poisoned
from evalengine.kernels import exact_recurrent, gated_delta, gated_delta_rows, mamba2, rms_norm
from evalengine.kernels.recurrent_variant import (
    DeltaInputs,
    DeltaState,
    GatedDelta,
    Mamba2,
    Mamba2Inputs,
    ScanState,
    chunk_table,
)
from evalengine.layers import ops
from tests import random_tensors
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference, reference_chunks

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LEVELS = ["native", "exact"]
# Tokens of five sequences: 1, a prime, chunks and one over, of which the interpreter sees fewer.
LENGTHS = (131, 1, 64, 5, 129) if CUDA else (67, 1, 64, 5, 65)
DELTAS = [
    GatedDelta(1, 2, 16, 8, 4),
    GatedDelta(1, 1, 7, 33, 4),
    GatedDelta(1, 3, 80, 65, 4),
    GatedDelta(2, 2, 16, 16, 4, beta_scale=2.0),
]
QWEN = GatedDelta(16, 32, 128, 128, 4)  # Qwen3.5-4B's
MAMBAS = [
    Mamba2(4, 8, 2, 16, 4, True, False, (0.0, None)),
    Mamba2(1, 65, 1, 67, 4, True, False, (0.05, 0.1)),
]
State = tuple[Tensor, ...]
Layer = Callable[[list[Tensor], State, list[int], list[int], list[int]], Tensor]


randn = partial(random_tensors.randn, device=DEVICE)


def on_device(query_lens: Sequence[int], kv_lens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, ...]:
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return tuple(torch.as_tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, kv_lens, slots))


def recurrence(
    level: str,
    variant: GatedDelta | Mamba2,
    heads: Sequence[Tensor],
    closes: int = 1,
    start_slots: Sequence[int] | None = None,
) -> Layer:
    exact: Any = exact_recurrent.gated_delta if isinstance(variant, GatedDelta) else exact_recurrent.mamba2

    def run(operands: list[Tensor], state: State, new: list[int], total: list[int], slots: list[int]) -> Tensor:
        if level == "exact":
            return exact(*operands, *heads, *state, new, total, slots, variant)
        decodes = next((s for s, n in enumerate(new) if n != 1), len(new))
        tensor = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
        closed = isinstance(variant, GatedDelta)
        chunks = chunk_table(new[decodes:], total[decodes:], lambda columns: map(tensor, columns), closed=closed)
        step = *on_device(new, total, slots), decodes, chunks if decodes < len(new) else None
        own = variant, closes, None if start_slots is None else tensor(start_slots)
        if isinstance(variant, Mamba2):
            return mamba2.mamba2(Mamba2Inputs(*operands, *heads), ScanState(*state), *step, *own)
        return gated_delta.gated_delta(DeltaInputs(*operands, *heads), DeltaState(*state), *step, *own)

    return run


def pools(level: str, variant: GatedDelta | Mamba2, dtype: torch.dtype, slots: int) -> State:
    """A recurrence's pools of states. Sequences that begin do not see what their slots hold."""
    shapes = variant.state_pools(dtype, chunked=level == "native")
    return tuple(torch.full((slots, *shape), float("nan"), dtype=dtype, device=DEVICE) for shape, dtype in shapes)


def case(
    variant: GatedDelta | Mamba2, dtype: torch.dtype, tokens: int = sum(LENGTHS)
) -> tuple[list[Tensor], list[Tensor]]:
    """The operands of all sequences' tokens, and the heads' parameters."""
    heads = variant.state_shape[0]
    delta = isinstance(variant, GatedDelta)
    operands = [randn(tokens, variant.channels, dtype=dtype)]
    operands += [randn(tokens, heads, seed=seed, dtype=dtype) for seed in ((1, 2) if delta else (1,))]
    return operands, [randn(heads, seed=seed) for seed in ((3, 4) if delta else (3, 4, 5))]


def assert_borders_do_not_matter(run: Layer, operands: list[Tensor], state: State) -> None:
    """All sequences in one step; then each with other neighbours, in other slots, its tokens cut into steps. What a
    sequence leaves in its slot is seen by the step after its last one."""
    slots = [3, 0, 5, 1, 2]
    whole_state, more = tuple(pool.clone() for pool in state), [x[:3] for x in operands]
    whole = run(operands, whole_state, list(LENGTHS), list(LENGTHS), slots)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for s, borders in ((0, (0, 1, 34, 55, 63, 64, 65, LENGTHS[0])), (2, (0, 50, 64)), (3, (0, 1, 2, 5))):
        other = tuple(pool.clone() for pool in state)
        for first, end in pairwise(borders):
            rows = torch.arange(starts[s] + first, starts[s] + end)
            place = int(len(rows) > 1)  # decodes come first
            mixed = [torch.cat([x[:place], x[rows], x[1:4]]) for x in operands]  # with others beside it
            totals, own = [*[9] * place, end, 3], [1, 4, 0][1 - place :]
            out = run(mixed, other, [*[1] * place, len(rows), 3], totals, own)
            assert_bitwise_equal(out[place : place + len(rows)], whole[rows])
        assert_bitwise_equal(
            run(more, other, [3], [LENGTHS[s] + 3], [4]), run(more, whole_state, [3], [LENGTHS[s] + 3], [slots[s]])
        )


# A dtype decides how many terms an operand has; sizes, which tiles are full. Chunks are slow in the interpreter.
STEPS = [
    *((torch.float32, variant) for variant in (DELTAS[1], *MAMBAS)),
    *((torch.float16, variant) for variant in (DELTAS[0], MAMBAS[0])),
    *(pytest.param(torch.float32, variant, marks=pytest.mark.slow) for variant in (DELTAS[0], *DELTAS[2:])),
    *(pytest.param(torch.float16, variant, marks=pytest.mark.slow) for variant in (*DELTAS[1:], *MAMBAS[1:])),
    *(pytest.param(torch.bfloat16, variant, marks=pytest.mark.gpu) for variant in (*DELTAS, *MAMBAS)),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "variant"), STEPS)
def test_a_step_may_end_anywhere(dtype: torch.dtype, variant: GatedDelta | Mamba2, level: str) -> None:
    operands, heads = case(variant, dtype)
    assert_borders_do_not_matter(recurrence(level, variant, heads), operands, pools(level, variant, dtype, 6))


@pytest.mark.parametrize("resident", [1, gated_delta_rows.RESIDENT])
@pytest.mark.parametrize(
    ("variant", "sequences", "dtype"),
    [
        (DELTAS[1], 3, torch.float32),
        *(pytest.param(QWEN, n, torch.bfloat16, marks=pytest.mark.gpu) for n in (1, 5, 70)),
    ],
)
def test_rows_of_a_chunk_are_decodes(
    variant: GatedDelta, sequences: int, dtype: torch.dtype, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several new rows at once, for one window and more, have the bytes of as many decodes: behind a chunk and behind
    none, whether one program has all tiles of a head or several share them."""
    monkeypatch.setattr(gated_delta_rows, "RESIDENT", resident)
    before = [(30, 70, 0)[s % 3] + s % 7 for s in range(sequences)]
    new = [(2, 15, 33)[s % 3] for s in range(sequences)]
    (mixed, a, b), heads = case(variant, dtype, sum(before) + sum(new))
    run, slots = recurrence("native", variant, heads), [*reversed(range(sequences))]
    state = pools("native", variant, dtype, sequences)
    had = sum(before)
    started = [s for s in range(sequences) if before[s]]
    run([x[:had] for x in (mixed, a, b)], state, *([x[s] for s in started] for x in (before, before, slots)))
    more, alone = [x[had:] for x in (mixed, a, b)], tuple(pool.clone() for pool in state)
    totals = [x + y for x, y in zip(before, new, strict=True)]
    together = run(more, state, new, totals, slots)
    starts = torch.tensor([0, *new]).cumsum(0).tolist()
    for r in range(max(new)):
        these = [s for s in range(sequences) if new[s] > r]
        rows = torch.tensor([starts[s] + r for s in these], device=DEVICE)
        out = run(
            [x[rows] for x in more],
            alone,
            [1] * len(these),
            [before[s] + r + 1 for s in these],
            [slots[s] for s in these],
        )
        assert_bitwise_equal(out, together[rows])


def assert_may_start_elsewhere(
    run: Callable[[Sequence[int] | None], Layer], operands: list[Tensor], state: State, before: int
) -> None:
    """Sequences that begin with the state in slot 2, where one of so many tokens has left it, have the bytes that they
    have behind a copy of it; one of them is in that slot. run: the layer, given the slots to begin with."""
    new, slots, had = [1, 9, 2, 13, 35, 70], [4, 2, 0, 5, 1, 3], [x[:before] for x in operands]
    run(None)(had, state, [before], [before], [2])
    more, totals, copied = [x[before:] for x in operands], [before + n for n in new], [pool.clone() for pool in state]
    for pool in copied:
        pool[slots] = pool[[2] * len(slots)]
    alone, blank = run(None)(more, tuple(copied), new, totals, slots), [pool.clone() for pool in state]
    for pool in state:
        pool[4] = pool[2]  # a decode's state is in its own slot
    assert_bitwise_equal(run([4, *[2] * 5])(more, state, new, totals, slots), alone)
    assert count_differing(run(None)(more, tuple(blank), new, totals, slots), alone)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.float32) for variant in (DELTAS[1], MAMBAS[0])),
        *(pytest.param(variant, torch.bfloat16, marks=pytest.mark.gpu) for variant in (QWEN, *DELTAS, *MAMBAS)),
    ],
)
@pytest.mark.parametrize("before", [13, 97])
def test_sequences_may_begin_in_another_slot(variant: GatedDelta | Mamba2, dtype: torch.dtype, before: int) -> None:
    operands, heads = case(variant, dtype, before + 130)
    run = partial(recurrence, "native", variant, heads, 1)
    assert_may_start_elsewhere(run, operands, pools("native", variant, dtype, 6), before)


@pytest.mark.parametrize(
    "variant", [DELTAS[1], MAMBAS[0], *(pytest.param(v, marks=pytest.mark.gpu) for v in (DELTAS[2], MAMBAS[1]))]
)
def test_one_launch_closes_the_chunks_of_all_layers(variant: GatedDelta | Mamba2) -> None:
    """Of three layers, the first of which closes all chunks, or none; padding's outputs are 0."""
    operands, heads = case(variant, torch.float32, 64)
    layers = tuple(pool.expand(3, *pool.shape).clone() for pool in pools("native", variant, torch.float32, 5))
    first = [x[[9, 5, 9]] for x in operands]  # of the second chunk, between two sequences of padding
    for i in range(3):
        own = [x.roll(i, 0) for x in operands]
        recurrence("native", variant, heads)(own, tuple(pool[i] for pool in layers), [64], [64], [4])

    def layer(i: int, state: State, closes: int) -> Tensor:
        own = tuple(pool[i] for pool in state)
        return recurrence("native", variant, heads, closes)(first, own, [1] * 3, [7, 65, 7], [-1, 4, -1])

    def step(*closes: int) -> list[Tensor]:
        state = tuple(pool.clone() for pool in layers)
        return [torch.stack([layer(i, state, n) for i, n in enumerate(closes)]), state[0][:, 4]]

    poisoned = run_poisoned(lambda: [layer(0, tuple(pool.clone() for pool in layers), 1)])[0]
    assert_bitwise_equal(poisoned[::2], torch.zeros_like(poisoned[::2]))
    alone = step(1, 1, 1)
    assert count_differing(alone[1][0], alone[1][1]) and count_differing(alone[1][1], alone[1][2])
    for one, other in zip(alone, step(3, 0, 0), strict=True):
        assert_bitwise_equal(one, other)
    assert count_differing(step(0, 0, 0)[1], alone[1]) and count_differing(step(1, 0, 0)[1], alone[1])


@pytest.mark.parametrize("variant", [DELTAS[1], MAMBAS[0]])
def test_padding_of_several_tokens_is_zeros(variant: GatedDelta | Mamba2) -> None:
    operands, heads = case(variant, torch.float32, 75)
    run = recurrence("native", variant, heads)
    state = pools("native", variant, torch.float32, 3)
    output = run_poisoned(lambda: [run(operands, state, [70, 5], [70, 5], [-1, 2])])[0]
    assert_bitwise_equal(output[:70], torch.zeros_like(output[:70]))
    assert not output[70:].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", [*DELTAS, *MAMBAS])
def test_recurrences_are_near_the_reference(variant: GatedDelta | Mamba2, level: str) -> None:
    assert_near(level, variant, LENGTHS[0], reference)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", [DELTAS[0], DELTAS[3], MAMBAS[0]])
@pytest.mark.parametrize("n", [1, 65, *(pytest.param(n, marks=pytest.mark.slow) for n in (63, 64, 127, 130))])
def test_recurrences_are_near_the_chunked_form(n: int, variant: GatedDelta | Mamba2, level: str) -> None:
    """Behind one chunk of 64 and two, and beside their borders."""
    assert_near(level, variant, n, reference_chunks)


@pytest.mark.parametrize("variant", [*DELTAS, *MAMBAS])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_both_forms_are_one_recurrence(chunk: int, variant: GatedDelta | Mamba2) -> None:
    """In float64, from a state on; but for their last bits, or the chunked one would be the other in disguise."""
    operands, heads = case(variant, torch.float32, 130)
    start = randn(*variant.state_shape, seed=9)
    forms = [
        in_float64(reference, variant, operands, heads, start),
        in_float64(reference_chunks, variant, operands, heads, start, chunk=chunk),
    ]
    for one, other in zip(*forms, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-11)
    assert chunk == 1 or count_differing(forms[0][0], forms[1][0])


def assert_near(level: str, variant: GatedDelta | Mamba2, n: int, form: ModuleType) -> None:
    """A level's output of n tokens, and its state behind them, are near those of a form in float64."""
    operands, heads = case(variant, torch.float32, n)
    state = pools(level, variant, torch.float32, 1)
    out = recurrence(level, variant, heads)(operands, state, [n], [n], [0])
    true, end = in_float64(form, variant, operands, heads, torch.zeros(variant.state_shape, device=DEVICE))
    tolerance = 3e-5 if level == "native" else 3e-6
    torch.testing.assert_close(out.double(), true, rtol=tolerance, atol=tolerance)
    if len(state) == 1:  # the state of the others is that before the open chunk
        torch.testing.assert_close(state[0][0].double(), end, rtol=tolerance, atol=tolerance)


def in_float64(
    form: ModuleType,
    variant: GatedDelta | Mamba2,
    operands: list[Tensor],
    heads: list[Tensor],
    start: Tensor,
    **more: int,
) -> tuple[Tensor, Tensor]:
    """One sequence's output and last state by a module that has both recurrences."""
    if isinstance(variant, GatedDelta):
        size = variant.num_key_heads * variant.key_dim
        q, k, v = operands[0].split([size, size, variant.channels - 2 * size], -1)
        sizes = variant.key_dim, variant.key_dim, variant.value_dim
        parts = [x.unflatten(-1, (-1, d)) for x, d in zip((q, k, v), sizes, strict=True)]
        delta: tuple[Tensor, Tensor] = form.gated_delta(
            *parts, *operands[1:], *heads, start, beta_scale=variant.beta_scale, **more
        )
        return delta
    size = variant.num_groups * variant.state_dim
    x, b, c = operands[0].split([variant.channels - 2 * size, size, size], -1)
    sizes = variant.head_dim, variant.state_dim, variant.state_dim
    parts = [y.unflatten(-1, (-1, d)) for y, d in zip((x, b, c), sizes, strict=True)]
    scan: tuple[Tensor, Tensor] = form.mamba2(*parts, operands[1], *heads, start, variant.dt_limits, **more)
    return scan


@pytest.mark.parametrize("rounded_once", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("width", "group", "repeated"), [(7, 7, False), (130, 65, True), (4096, 1024, False)])
@pytest.mark.parametrize("level", LEVELS)
def test_gated_norms(level: str, width: int, group: int, repeated: bool, gate_first: bool, rounded_once: bool) -> None:
    x, gate, weight = randn(5, width), randn(5, width, seed=1), randn(group if repeated else width, seed=2)
    native = partial(rms_norm.gated_norm, rounded_once=rounded_once)
    function = native if level == "native" else exact_recurrent.gated_norm
    norm = partial(function, weight=weight, eps=1e-5, group=group, gate_first=gate_first)
    out = norm(x, gate)
    true = reference.gated_norm(x, gate, weight, 1e-5, group, gate_first=gate_first)
    torch.testing.assert_close(out.double(), true, rtol=2e-6, atol=2e-6)
    for row in range(5):
        assert_bitwise_equal(norm(x[row : row + 1], gate[row : row + 1]), out[row : row + 1])


@pytest.mark.parametrize("rounded_once", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
def test_where_gated_norms_round(gate_first: bool, rounded_once: bool) -> None:
    """The kernel in float16 is as near to plain torch with the same rounding points as float32 is, and not to that with
    the other ones."""
    x, gate, weight = (randn(*shape, seed=s, dtype=torch.float16) for s, shape in enumerate(((5, 96), (5, 96), (96,))))
    out = rms_norm.gated_norm(x, gate, weight, 1e-5, 48, gate_first=gate_first, rounded_once=rounded_once)
    same, other = (
        ops.gated_norm(x, gate, weight, 1e-5, 48, gate_first=gate_first, rounded_once=rounded)
        for rounded in (rounded_once, not rounded_once)
    )
    assert count_differing(out, same) <= 3 < 30 < count_differing(out, other)


def test_a_chunked_form_would_show_where_a_step_ends() -> None:
    """The control: the chunked form differs in some bits, in float64 even, as soon as another token begins a chunk."""
    variant = DELTAS[0]
    operands, heads = case(variant, torch.float32, LENGTHS[0])
    start = torch.zeros(variant.state_shape, device=DEVICE)
    whole, shifted = (in_float64(reference_chunks, variant, operands, heads, start, chunk=c)[0] for c in (16, 17))
    assert count_differing(whole, shifted)
