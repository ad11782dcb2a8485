"""`native` recurrences: a step's state read and written once, beside a copy of as many bytes; prefill by the token.

    S sequences of L new tokens each. Shapes: the gated delta rule of Qwen3.5-4B, the Mamba-2 of Granite 4.0 H Tiny.

A decode must read and write the states, 4 bytes a number. A long prefill is bound by the chain from token to token, so
its line says only how long it takes; many prompts at once fill the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timer, check_close, guarded, run_poisoned, seeded
from benchmarks.report import Line, Timing
from evalengine.bench.floor import LARGE_COPY_BYTES, copies_of, quickest_copy
from evalengine.bench.timing import free_memory
from evalengine.kernels import causal_conv, gated_delta, mamba2
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2
from tests.references import reference

DELTA = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, taps=4)
MAMBA = Mamba2(48, 64, 1, 128, 4, conv_bias=True, bias=False, dt_limits=(0.0, float("inf")))
DTYPE = torch.bfloat16
DECODES: dict[int, float | None] = {1: None, 16: None, 256: 0.65}  # sequences -> share of a copy's bandwidth
PREFILLS = ((80, 100), (8, 1024), (1, 8192))  # sequences, tokens of each
# The convolution's share of a copy's bandwidth. Of a decode a third is the launch (10 us in a graph); SiLU and the next
# tile's inputs cost the rest of a prefill.
CONVOLUTIONS = {(256, 1): 0.5, (80, 100): 0.6, (8, 1024): 0.6, (1, 8192): 0.65}
CHECKED = 0.02  # of the error over (magnitude + root mean square): bf16 inputs are normed, outputs rounded


def measure(timer: Timer, device: torch.device) -> Iterator[Line]:
    """Yields decodes, then prefills, of each recurrence; then the convolution before the gated delta rule."""
    for variant in (DELTA, MAMBA):
        what = f"recurrence, {type(variant).__name__}"
        for sequences, target in DECODES.items():
            run = partial(_recurrence, what, variant, sequences, 1, target, timer, device)
            yield from guarded(what, f"decode, batch {sequences}", run)
            free_memory()
        for sequences, tokens in PREFILLS:
            run = partial(_recurrence, what, variant, sequences, tokens, None, timer, device)
            yield from guarded(what, f"prefill, {sequences} x {tokens}", run)
            free_memory()
    for (sequences, tokens), target in CONVOLUTIONS.items():
        run = partial(_convolution, sequences, tokens, target, timer, device)
        yield from guarded("convolution", f"{sequences} x {tokens}", run)
        free_memory()


def _sequences(sequences: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, lengths and slots of sequences with a state from before."""
    starts = torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), tokens + 7, dtype=torch.int32, device=device)
    return starts, lengths, torch.arange(sequences, dtype=torch.int32, device=device).flip(0).contiguous()


def _recurrence(
    what: str, variant: GatedDelta | Mamba2, sequences: int, tokens: int, target: float | None, timer: Timer,
    device: torch.device,
) -> list[Line]:  # fmt: skip
    normal = partial(torch.randn, generator=seeded(device, sequences + tokens), device=device)
    rows, heads = sequences * tokens, variant.state_shape[0]
    per_head: Any
    of_heads: Any
    mixed, per_head = normal(rows, variant.channels, dtype=DTYPE), [normal(rows, heads, dtype=DTYPE)]
    of_heads = [normal(heads) for _ in range(2)]
    if isinstance(variant, GatedDelta):
        per_head.append(normal(rows, heads, dtype=DTYPE))
    else:
        of_heads.append(normal(heads))
    state = normal(sequences, *variant.state_shape)
    step = _sequences(sequences, tokens, device)

    kernel: Any = gated_delta.gated_delta if isinstance(variant, GatedDelta) else mamba2.mamba2

    def run(state: Tensor = state) -> Tensor:
        output: Tensor = kernel(mixed, *per_head, *of_heads, state, *step, variant)
        return output

    fresh = state.clone()
    output = run_poisoned(lambda: [run(fresh.clone())])[0]
    some = min(tokens, 64)
    truth = _truth(variant, mixed[:some], [x[:some] for x in per_head], of_heads, fresh[sequences - 1])
    check_close(f"{what}, {sequences} x {tokens}", output[:some], truth, CHECKED)
    seconds = timer({"ours": run, **copies_of(LARGE_COPY_BYTES, device)})
    num_bytes = 2 * state.numel() * state.itemsize
    copied = num_bytes / (LARGE_COPY_BYTES / quickest_copy(seconds))
    case = f"decode, batch {sequences}" if tokens == 1 else f"prefill, {sequences} x {tokens}"
    details = {"us_a_token": seconds["ours"] / tokens * 1e6}
    return [
        Timing(what, case, seconds["ours"], "copy of the states", copied, "speed", target, num_bytes, "TB/s", details)
    ]


def _truth(variant: GatedDelta | Mamba2, mixed: Tensor, per_head: Any, of_heads: Any, state: Tensor) -> Tensor:
    """float64 [n, heads, ...] of the first sequence's first tokens."""
    if isinstance(variant, GatedDelta):
        widths = variant.key_dim, variant.key_dim, variant.value_dim
    else:
        widths = variant.head_dim, variant.state_dim, variant.state_dim
    parts = mixed.split(list(variant.parts.values()), -1)
    operands: Any = [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)]
    true: Any = reference.gated_delta if isinstance(variant, GatedDelta) else reference.mamba2
    limits = () if isinstance(variant, GatedDelta) else (variant.dt_limits,)
    output: Tensor = true(*operands, *per_head, *of_heads, state, *limits)[0]
    return output


def _convolution(sequences: int, tokens: int, target: float, timer: Timer, device: torch.device) -> list[Line]:
    normal = partial(torch.randn, generator=seeded(device, sequences + tokens), device=device, dtype=DTYPE)
    x, weight = normal(sequences * tokens, DELTA.channels), normal(DELTA.channels, DELTA.taps)
    state = normal(sequences, DELTA.taps - 1, DELTA.channels)
    step = _sequences(sequences, tokens, device)

    def run() -> Tensor:
        return causal_conv.causal_conv(x, weight, None, state, *step, tokens, silu=True)

    before = state[sequences - 1].clone()
    output = run_poisoned(lambda: [run()])[0]
    state[sequences - 1] = before
    check_close(
        "convolution", run()[:tokens], reference.causal_conv(x[:tokens], weight, None, before, silu=True), CHECKED
    )
    seconds = timer({"ours": run, **copies_of(LARGE_COPY_BYTES, device)})
    num_bytes = 2 * (output.numel() + state.numel()) * output.itemsize
    copied = num_bytes / (LARGE_COPY_BYTES / quickest_copy(seconds))
    case = f"{sequences} x {tokens}"
    return [Timing("convolution", case, seconds["ours"], "copy", copied, "speed", target, num_bytes, "TB/s")]
