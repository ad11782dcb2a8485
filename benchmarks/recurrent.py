"""`native` recurrences and their convolution, next to what they should take on an H200, scaled by the copy's bandwidth.

    S sequences of L new tokens each. Shapes: the gated delta rule of Qwen3.5-4B, the Mamba-2 of Granite 4.0 H Tiny.

A decode reads its state and the rows of its open chunk. Decodes of 64 sequences or more are at all rows of a chunk, so
of 64 of them one closes one; fewer are spread over the rows and close none. Times of decodes are a layer's average over
LAYERS layers, because one launch closes the chunks of all layers. A copy of the states (read and written once) is the
least that a rule without chunks moves. Rates are of the bytes that a decode reads: the state and half of the rows.

The gated delta rule and the convolution are also compared with flash-linear-attention's kernels if the package fla-core
(and einops, which it imports) is installed. Both sides compute the same bfloat16 tokens, and read and write the states
(float32 for the gated delta rule). The timed calls include the norms of q and k, the gates and beta. They exclude the
split of q, k and v, which fla-core takes as contiguous tensors. Here a decode is one layer alone, which closes its own
chunks. Mamba-2 is not compared: the matching kernel, `simple_gla`, has no groups. B and C would have to be copied for
each of the 48 heads, and the time step and D would be separate operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Timer, check_close, guarded, run_poisoned, seeded
from benchmarks.report import Line, Timing
from evalengine.bench.floor import LARGE_COPY_BYTES, copies_of, quickest_copy
from evalengine.bench.timing import free_memory
from evalengine.kernels import causal_conv, gated_delta, mamba2
from evalengine.kernels.recurrent_variant import (
    DeltaInputs,
    DeltaState,
    GatedDelta,
    Mamba2,
    Mamba2Inputs,
    ScanState,
    chunk_table,
    ring_rows,
)
from tests.references import reference

DELTA = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, taps=4)
MAMBA = Mamba2(48, 64, 1, 128, 4, conv_bias=True, bias=False, dt_limits=(0.0, float("inf")))
LAYERS = 24  # of Qwen3.5-4B with the gated delta rule
DTYPE = torch.bfloat16
COPY_OF_H200 = 4.26e12  # bytes a second, read and written
# Seconds on an H200 of (sequences, tokens of each).
DECODES = (1, 1), (16, 1), (256, 1)
PREFILLS = (80, 100), (8, 1024), (1, 8192)
DELTA_TARGETS = {(256, 1): 230e-6, (80, 100): 1.3e-3, (8, 1024): 1.2e-3, (1, 8192): 1.2e-3}
SCAN_TARGETS = {(256, 1): 165e-6, (80, 100): 1e-3, (8, 1024): 1e-3, (1, 8192): 1e-3}
CONVOLUTION_TARGETS = {(256, 1): 12e-6, (80, 100): 75e-6, (8, 1024): 75e-6, (1, 8192): 75e-6}
CHECKED = 0.02  # of the error over (magnitude + root mean square): bf16 inputs are normed, outputs rounded
# The same limit for fla-core's kernels, compared with ours. They round more to the inputs' dtype: the normalised q and
# k, each chunk's state, and what a row adds to it.
CHECKED_FLA = 0.1


def measure(timer: Timer, device: torch.device) -> Iterator[Line]:
    """Yields decodes, then prefills, of each recurrence; then the convolution before the gated delta rule."""
    for variant, targets in ((DELTA, DELTA_TARGETS), (MAMBA, SCAN_TARGETS)):
        what = f"recurrence, {type(variant).__name__}"
        for shape in (*DECODES, *PREFILLS):
            run = partial(_recurrence, what, variant, shape, targets.get(shape), timer, device)
            yield from guarded(what, _case(shape), run)
            free_memory()
    for shape, target in CONVOLUTION_TARGETS.items():
        yield from guarded("convolution", _case(shape), partial(_convolution, shape, target, timer, device))
        free_memory()


def _case(shape: tuple[int, int]) -> str:
    sequences, tokens = shape
    return f"decode, batch {sequences}" if tokens == 1 else f"prefill, {sequences} x {tokens}"


def _line(
    what: str, shape: tuple[int, int], seconds: dict[str, float], target: float | None, moved: float, copied: int = 0
) -> list[Line]:
    """Compared with the target, or with a copy of so many bytes, read and written together. moved: our bytes."""
    rate = LARGE_COPY_BYTES / quickest_copy(seconds)
    theirs, compared_with = copied / rate, "copy of the states"
    if target is not None:
        theirs, compared_with = target * COPY_OF_H200 / rate, "target"
    least, unit = None if target is None else 1.0, "TB/s" if moved else ""
    return [Timing(what, _case(shape), seconds["ours"], compared_with, theirs, "speed", least, moved, unit)]


def _step(lengths: list[int], before: list[int], device: torch.device, *, closed: bool = True) -> tuple[Any, ...]:
    """Starts, lengths and slots of sequences with so many tokens from before; the decodes, and the others' chunks."""
    totals = [new + old for new, old in zip(lengths, before, strict=True)]
    decodes = len(lengths) if max(lengths) == 1 else 0
    sequences = [0, *accumulate(lengths)], totals, [*reversed(range(len(lengths)))]
    tensor = partial(torch.tensor, dtype=torch.int32, device=device)
    chunks = None if decodes else chunk_table(lengths, totals, lambda columns: map(tensor, columns), closed=closed)
    return *map(tensor, sequences), decodes, chunks


def _recurrence(
    what: str, variant: GatedDelta | Mamba2, shape: tuple[int, int], target: float | None, timer: Timer,
    device: torch.device,
) -> list[Line]:  # fmt: skip
    sequences, tokens = shape
    normal = partial(torch.randn, generator=seeded(device, sequences + tokens), device=device)
    heads, is_delta = variant.state_shape[0], isinstance(variant, GatedDelta)
    of_heads = [normal(heads) for _ in range(2 if is_delta else 3)]

    def operands(rows: int) -> list[Tensor]:
        widths = [variant.channels, heads, *([heads] if is_delta else [])]
        return [normal(rows, width, dtype=DTYPE) for width in widths]

    kernel: Any = gated_delta.gated_delta if is_delta else mamba2.mamba2
    inputs: Any = DeltaInputs if is_delta else Mamba2Inputs
    kind: Any = DeltaState if is_delta else ScanState

    def run(rows: list[Tensor], state: list[Tensor], step: tuple[Any, ...], closes: int = 1) -> Tensor:
        output: Tensor = kernel(inputs(*rows, *of_heads), kind(*state), *step, variant, closes)
        return output

    state = [
        torch.zeros(sequences, *shape, dtype=dtype, device=device)
        for shape, dtype in variant.state_pools(DTYPE, chunked=True)
    ]
    spread = max(1, 64 // sequences)  # the rows of decodes
    before = [7 if tokens > 1 else 64 + (33 + s * spread) % 64 for s in range(sequences)]
    history, new = operands(sum(before)), operands(sequences * tokens)
    run(history, state, _step(before, [0] * sequences, device, closed=is_delta))
    step = _step([tokens] * sequences, before, device, closed=is_delta)
    fresh = [pool.clone() for pool in state]
    output = run_poisoned(lambda: [run(new, [pool.clone() for pool in fresh], step)])[0]
    some = min(tokens, 64)
    both = [torch.cat([old[: before[0]], own[:some]]) for old, own in zip(history, new, strict=True)]
    truth, _ = _truth(variant, both[0], both[1:], of_heads, torch.zeros(variant.state_shape, device=device))
    check_close(f"{what}, {sequences} x {tokens}", output[:some], truth[before[0] :], CHECKED)
    layers = LAYERS if tokens == 1 else 1
    pools = [pool.repeat(layers, *(1 for _ in pool.shape)) for pool in state]

    def of_layers() -> None:
        for layer in range(layers):
            run(new, [pool[layer] for pool in pools], step, closes=0 if layer else layers)

    seconds = timer({"ours": of_layers, **copies_of(LARGE_COPY_BYTES, device)})
    seconds["ours"] /= layers
    sizes = [pool.numel() * pool.itemsize for pool in state]
    moved = (sum(sizes) + sizes[0]) / 2 if tokens == 1 else 0  # the state and half of the rows
    lines = _line(what, shape, seconds, target, moved, copied=2 * sizes[0])
    if isinstance(variant, GatedDelta):
        theirs = partial(_fla_delta, variant, history, new, of_heads, before, tokens)
        ours = partial(run, new, state, step)
        lines += _compare_with_fla(what, shape, "ops.gated_delta_rule", theirs, ours, output, timer)
    return lines


def _compare_with_fla(
    what: str, shape: tuple[int, int], module: str, build: Callable[[Any], Callable[[], Any]],
    ours: Callable[[], Tensor], expected: Tensor, timer: Timer,
) -> list[Line]:  # fmt: skip
    """Time our kernel and fla-core's in turns, after comparing its output with ours, `expected`.

    Returns one line, a `Failure` if its kernel fails, or none if the package is not installed. build: returns the
    kernel's call, given the package's module. The output is the first element of what the call returns.
    """
    if find_spec("fla") is None:
        return []
    case = f"{_case(shape)}, fla-core"

    def compare() -> list[Line]:
        theirs = build(import_module(f"fla.{module}"))
        check_close(f"{what}, {case}", theirs()[0].view(expected.shape), expected, CHECKED_FLA)
        seconds = timer({"ours": ours, "fla-core": theirs})
        return [Timing(what, _case(shape), seconds["ours"], "fla-core", seconds["fla-core"])]

    return [*guarded(what, case, compare)]


def _fla_delta(
    variant: GatedDelta, old: list[Tensor], new: list[Tensor], of_heads: list[Tensor], before: list[int], tokens: int,
    fla: Any,
) -> Callable[[], Any]:  # fmt: skip
    """Return the call of fla-core's kernel for the new rows. Its chunk kernel computes the start states, from `old`."""
    a_log, dt_bias = of_heads

    def call(function: Any, rows: list[Tensor], batch_dim: int, **sequences: Any) -> Callable[[], Any]:
        mixed, a, b = rows
        q, k, v, g, beta = (x.contiguous().unsqueeze(batch_dim) for x in (*_parts(variant, mixed), a, b))
        return partial(
            function, q, k, v, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **sequences,
        )  # fmt: skip

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], device=a_log.device)

    state = call(fla.chunk_gated_delta_rule, old, 0, cu_seqlens=starts(before))()[1]
    if tokens == 1:
        return call(fla.fused_recurrent_gated_delta_rule, new, 1, initial_state=state)
    cu_seqlens = starts([tokens] * len(before))
    return call(fla.chunk_gated_delta_rule, new, 0, initial_state=state, cu_seqlens=cu_seqlens)


def _parts(variant: GatedDelta | Mamba2, mixed: Tensor) -> list[Tensor]:
    """[n, C] -> the convolution's parts by heads (q, k and v; x, B and C), [n, heads, width] each."""
    if isinstance(variant, GatedDelta):
        widths = variant.key_dim, variant.key_dim, variant.value_dim
    else:
        widths = variant.head_dim, variant.state_dim, variant.state_dim
    parts = mixed.split(list(variant.parts.values()), -1)
    return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)]


def _truth(
    variant: GatedDelta | Mamba2, mixed: Tensor, per_head: Any, of_heads: Any, state: Tensor
) -> tuple[Tensor, Tensor]:
    """float64 [n, heads, ...] of a sequence's n tokens, and its state after them."""
    true: Any = reference.gated_delta if isinstance(variant, GatedDelta) else reference.mamba2
    limits = () if isinstance(variant, GatedDelta) else (variant.dt_limits,)
    output, state = true(*_parts(variant, mixed), *per_head, *of_heads, state, *limits)
    return output, state


def _convolution(shape: tuple[int, int], target: float, timer: Timer, device: torch.device) -> list[Line]:
    sequences, tokens = shape
    normal = partial(torch.randn, generator=seeded(device, sequences + tokens), device=device, dtype=DTYPE)
    x, weight = normal(sequences * tokens, DELTA.channels), normal(DELTA.taps, DELTA.channels).t()
    state, begin = normal(sequences, ring_rows(DELTA.taps), DELTA.channels), 7
    starts, lengths, slots, *_ = _step([tokens] * sequences, [begin] * sequences, device)

    def run() -> Tensor:
        return causal_conv.causal_conv(x, weight, None, state, starts, lengths, slots, tokens, silu=True)

    fresh = state.clone()
    output = run_poisoned(lambda: [state.copy_(fresh), run()][1:])[0]
    before = fresh[:, begin - DELTA.taps + 1 : begin].flip(0)  # of sequences, whose slots are in the opposite order
    truth = reference.causal_conv(x[:tokens], weight, None, before[0], silu=True)
    check_close("convolution", output[:tokens], truth, CHECKED)
    seconds = timer({"ours": run, **copies_of(LARGE_COPY_BYTES, device)})
    written = 1 if tokens == 1 else DELTA.taps - 1
    rows = 2 * len(x) + sequences * (DELTA.taps - 1 + written)
    lines = _line("convolution", shape, seconds, target, rows * DELTA.channels * output.itemsize)
    theirs = partial(_fla_conv, x, weight.contiguous(), before, tokens)
    return lines + _compare_with_fla("convolution", shape, "modules.convolution", theirs, run, output, timer)


def _fla_conv(x: Tensor, weight: Tensor, before: Tensor, tokens: int, fla: Any) -> Callable[[], Any]:
    """Return the call of fla-core's convolution of x [T, C]. before: each sequence's last inputs [S, K - 1, C]."""
    cache = F.pad(before.transpose(1, 2), (1, 0))  # [S, C, K], of which a call reads the last K - 1
    if tokens == 1:
        return partial(fla.causal_conv1d_update, x, cache, weight=weight, activation="silu")
    starts = torch.arange(0, len(x) + 1, tokens, device=x.device)
    return partial(
        fla.causal_conv1d, x[None], weight, initial_state=cache, output_final_state=True, activation="silu",
        cu_seqlens=starts,
    )  # fmt: skip
