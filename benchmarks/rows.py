"""Kernels that only move bytes, row by row, against a copy of the same bytes; `row_cases` builds each case.

    T rows (tokens), H hidden, I intermediate, V vocabulary, Hq/Hkv heads, D head_dim.

A kernel's bytes are those of each input and each output, once. The copy moves as many, half read and half written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import row_cases
from benchmarks.measure import Timer, guarded, run_poisoned
from benchmarks.models import shapes_of
from benchmarks.report import Line, Timing
from benchmarks.row_cases import RowCase
from evalengine.bench.floor import copies_of, quickest_copy
from evalengine.bench.timing import free_memory
from evalengine.kernels.log_softmax import log_softmax
from evalengine.kernels.softmax import softmax

TARGET = 0.85  # share of the copy's speed, at least
# These have no target: no step of the engine takes a softmax or a mean, nor RoPE or the KV write apart from what they
# are fused with; and sampling is arithmetic and a sort (256 x 151936 on an H200: 1.3 ms, 12.9 ms with top-k and top-p),
# of which reading the logprobs (0.04 ms) is only the floor.
REPORTED = {"softmax", "mean", "RoPE", "KV write", "Gumbel noise", "sampling"}


SMALL, MIDDLE, LARGE = (shapes_of(name) for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B"))


@dataclass(frozen=True)
class RowShapes:
    """The shapes of one run. The defaults are those of three Qwen3 models, and a small vocabulary besides theirs."""

    rows: int = 8192
    sampled: int = 256  # rows of a decode step; each table of float64 over them and the vocabulary is 311 MB
    hidden: tuple[int, ...] = (SMALL.hidden_size, MIDDLE.hidden_size, LARGE.hidden_size)
    intermediate: tuple[int, ...] = (SMALL.intermediate_size, LARGE.intermediate_size)
    vocab: tuple[int, ...] = (4096, shapes_of("SmolLM2-135M").vocab_size, LARGE.vocab_size)
    heads: tuple[tuple[int, int, int], ...] = tuple((s.num_heads, s.num_kv_heads, s.head_dim) for s in (SMALL, LARGE))
    dtype: torch.dtype = torch.bfloat16


def measure(timer: Timer, device: torch.device, sizes: RowShapes | None = None) -> Iterator[Line]:
    """Yields a line per kernel and shape."""
    sizes = sizes or RowShapes()
    for what, case, build in _cases(sizes, device):
        yield from guarded(what, case, partial(_compare, what, case, build, timer, device))
        free_memory()


def _compare(what: str, case: str, build: Callable[[], RowCase], timer: Timer, device: torch.device) -> list[Line]:
    row_case = build()
    row_case.check(run_poisoned(row_case.run))
    seconds = timer({"ours": row_case.run, **copies_of(row_case.num_bytes, device)})
    line = Timing(
        what=what,
        case=case,
        seconds=seconds["ours"],
        reference="copy of the same bytes",
        reference_seconds=quickest_copy(seconds),
        target=None if what in REPORTED else TARGET,
        work=row_case.num_bytes,
        unit="TB/s",
    )
    return [line]


def _cases(sizes: RowShapes, device: torch.device) -> Iterator[tuple[str, str, Callable[[], RowCase]]]:
    rows, dtype = sizes.rows, sizes.dtype
    for hidden in sizes.hidden:
        yield "rms_norm", f"{rows} x {hidden}", partial(row_cases.of_rms_norm, rows, hidden, dtype, device)
    for hidden in sizes.hidden:
        build = partial(row_cases.of_add_rms_norm, rows, hidden, dtype, device)
        yield "residual add + rms_norm", f"{rows} x {hidden}", build
    for hidden in sizes.hidden:
        yield "mean", f"{rows} x {hidden}", partial(row_cases.of_mean, rows, hidden, dtype, device)
    yield from _vocabulary_cases(sizes, device)
    for width in sizes.intermediate:
        yield "silu_and_mul", f"{rows} x {width}", partial(row_cases.of_silu_and_mul, rows, width, dtype, device)
    for heads in sizes.heads:
        case = f"{rows} tokens, {heads[0]} + {heads[1]} heads of {heads[2]}"
        build = partial(row_cases.of_qk_norm_rope_store, rows, heads, dtype, device)
        yield "q/k norm + RoPE + KV write", case, build
    for heads in sizes.heads:
        case = f"{rows} tokens, {heads[0]} heads of {heads[2]}"
        yield "RoPE", case, partial(row_cases.of_rope, rows, heads, dtype, device)
    heads = sizes.heads[-1]
    case = f"{rows} tokens, {heads[1]} heads of {heads[2]}"
    yield "KV write", case, partial(row_cases.of_store_kv, rows, heads, dtype, device)


def _vocabulary_cases(sizes: RowShapes, device: torch.device) -> Iterator[tuple[str, str, Callable[[], RowCase]]]:
    rows, small, large = sizes.rows, sizes.vocab[0], sizes.vocab[-1]
    for vocab in sizes.vocab:
        case = f"{rows} x {vocab} float32"
        yield "log_softmax", case, partial(row_cases.of_softmax, log_softmax, rows, vocab, device)
    yield "softmax", f"{rows} x {small} float32", partial(row_cases.of_softmax, softmax, rows, small, device)
    for vocab in sizes.vocab:
        yield "log_softmax gather", f"{rows} x {vocab} float32", partial(row_cases.of_read_out, rows, vocab, device)
    case = f"{sizes.sampled} x {large}"
    yield "Gumbel noise", f"{case} float64", partial(row_cases.of_gumbel_noise, sizes.sampled, large, device)
    for top_k, top_p, filters in ((0, 1.0, ""), (50, 0.9, ", top-k 50, top-p 0.9")):
        build = partial(row_cases.of_sample, sizes.sampled, large, top_k, top_p, device)
        yield "sampling", f"{case} float32{filters}", build
