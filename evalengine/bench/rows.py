"""Kernels that only move bytes, row by row, against a copy of the same bytes.

    T rows (tokens), H hidden, I intermediate, V vocabulary, Hq/Hkv heads, D head_dim.

Bytes are each input once and each output once. The copy moves as many, half read and half written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from evalengine.bench.measure import (
    Timer,
    check_close,
    check_equal,
    copies_of,
    free_memory,
    guarded,
    nbytes,
    quickest_copy,
    run_poisoned,
    seeded,
)
from evalengine.bench.report import Comparison, Line
from evalengine.kernels import reference
from evalengine.kernels.activation import silu_and_mul
from evalengine.kernels.log_softmax import log_softmax, read_out
from evalengine.kernels.qkv import qk_norm_rope_store
from evalengine.kernels.rms_norm import add_rms_norm, rms_norm
from evalengine.kernels.softmax import softmax

TARGET = 0.85  # of the copy's speed
EPS = 1e-6
PAGE = 64
CHECKED_ROWS = 32  # at each end


@dataclass(frozen=True)
class Sizes:
    """The shapes of one run. The defaults are Qwen3-0.6B's, 1.7B's and 8B's, and the vocabularies of three models."""

    rows: int = 8192
    hidden: tuple[int, ...] = (1024, 2048, 4096)
    intermediate: tuple[int, ...] = (3072, 12288)
    vocab: tuple[int, ...] = (4096, 49152, 151936)
    heads: tuple[tuple[int, int, int], ...] = ((16, 8, 128), (32, 8, 128))  # Hq, Hkv, D
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class RowCase:
    """One kernel on one shape: `run` launches it, `check` raises WrongResult, `num_bytes` is what it must move."""

    run: Callable[[], Sequence[Tensor]]
    check: Callable[[Sequence[Tensor]], None]
    num_bytes: int


def measure(timer: Timer, device: torch.device, sizes: Sizes | None = None) -> Iterator[Line]:
    """Yields a line per kernel and shape."""
    sizes = sizes or Sizes()
    for what, case, build in _cases(sizes, device):
        yield from guarded(what, case, partial(_compare, what, case, build, timer, device))
        free_memory()


def _compare(what: str, case: str, build: Callable[[], RowCase], timer: Timer, device: torch.device) -> list[Line]:
    row_case = build()
    row_case.check(run_poisoned(row_case.run))
    seconds = timer({"ours": row_case.run, **copies_of(row_case.num_bytes, device)})
    line = Comparison(
        what=what,
        case=case,
        seconds=seconds["ours"],
        beside="copy of the same bytes",
        beside_seconds=quickest_copy(seconds),
        target=None if what == "softmax" else TARGET,  # no step of the engine takes a softmax
        work=row_case.num_bytes,
        unit="TB/s",
    )
    return [line]


def _cases(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, str, Callable[[], RowCase]]]:
    rows, dtype = sizes.rows, sizes.dtype
    for hidden in sizes.hidden:
        yield "rms_norm", f"{rows} x {hidden}", partial(_rms_norm, rows, hidden, dtype, device)
    for hidden in sizes.hidden:
        yield "residual add + rms_norm", f"{rows} x {hidden}", partial(_add_rms_norm, rows, hidden, dtype, device)
    for vocab in sizes.vocab:
        yield "log_softmax", f"{rows} x {vocab} float32", partial(_softmax, log_softmax, rows, vocab, device)
    yield "softmax", f"{rows} x {sizes.vocab[0]} float32", partial(_softmax, softmax, rows, sizes.vocab[0], device)
    for vocab in sizes.vocab:
        yield "log_softmax gather", f"{rows} x {vocab} float32", partial(_read_out, rows, vocab, device)
    for width in sizes.intermediate:
        yield "silu_and_mul", f"{rows} x {width}", partial(_silu_and_mul, rows, width, dtype, device)
    for heads in sizes.heads:
        case = f"{rows} tokens, {heads[0]} + {heads[1]} heads of {heads[2]}"
        yield "q/k norm + RoPE + KV write", case, partial(_qk_norm_rope_store, rows, heads, dtype, device)


def _ends(*tensors: Tensor) -> list[Tensor]:
    """The first and the last rows of each: what is compared with float64."""
    return [torch.cat((t[:CHECKED_ROWS], t[-CHECKED_ROWS:])) for t in tensors]


def _normal(device: torch.device, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(device, seed), dtype=dtype, device=device)


def _rms_norm(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    x, weight = _normal(device, 1, rows, hidden, dtype=dtype), _normal(device, 2, hidden, dtype=dtype)

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, normed = _ends(x, outputs[0])
        check_close("rms_norm", normed, reference.rms_norm(inputs, weight, EPS))
        assert outputs[0].isfinite().all()

    return RowCase(lambda: [rms_norm(x, weight, EPS)], check, nbytes(x, weight, x))


def _add_rms_norm(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    x, residual = (_normal(device, seed, rows, hidden, dtype=dtype) for seed in (3, 4))
    weight = _normal(device, 5, hidden, dtype=dtype)

    def check(outputs: Sequence[Tensor]) -> None:
        check_equal("residual sum", outputs[1], x + residual)
        normed, total = _ends(*outputs)
        check_close("rms_norm of the sum", normed, reference.rms_norm(total, weight, EPS))

    return RowCase(lambda: add_rms_norm(x, residual, weight, EPS), check, nbytes(x, residual, weight, x, x))


def _softmax(function: Callable[[Tensor], Tensor], rows: int, vocab: int, device: torch.device) -> RowCase:
    logits = _normal(device, 6, rows, vocab)
    truth = reference.log_softmax if function is log_softmax else reference.softmax

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, result = _ends(logits, outputs[0])
        check_close(function.__name__, result, truth(inputs))

    return RowCase(lambda: [function(logits)], check, nbytes(logits, logits))


def _read_out(rows: int, vocab: int, device: torch.device) -> RowCase:
    logits = _normal(device, 7, rows, vocab)
    targets = torch.randint(0, vocab, (rows,), generator=seeded(device, 8), device=device)

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, columns, greedy, logprobs = _ends(logits, targets, *outputs)
        check_equal("greedy id", greedy, inputs.argmax(-1))
        check_close("logprob", logprobs, reference.log_softmax(inputs).gather(1, columns[:, None]).squeeze(1))

    return RowCase(lambda: read_out(logits, None, targets), check, nbytes(logits, targets, targets, logits[:, 0]))


def _silu_and_mul(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    gate_up = _normal(device, 9, rows, 2 * width, dtype=dtype)

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, result = _ends(gate_up, outputs[0])
        check_close("silu_and_mul", result, reference.silu_and_mul(inputs))

    return RowCase(lambda: [silu_and_mul(gate_up)], check, nbytes(gate_up, gate_up[:, :width]))


def _qk_norm_rope_store(rows: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> RowCase:
    """Into a pool of twice the slots, at shuffled ones. Weights of a norm lie around 1."""
    q_heads, kv_heads, dim = heads
    qkv = _normal(device, 10, rows, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = qkv.unflatten(1, (-1, dim)).split([q_heads, kv_heads, kv_heads], dim=1)
    q_weight, k_weight = (1 + 0.1 * _normal(device, seed, dim, dtype=dtype) for seed in (11, 12))
    angles = torch.rand(rows, dim // 2, generator=seeded(device, 13), device=device) * 6.2832
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pages = -(-2 * rows // PAGE)
    k_cache, v_cache = (torch.full((pages, PAGE, kv_heads, dim), torch.nan, dtype=dtype, device=device) for _ in "kv")
    slots = torch.randperm(pages * PAGE, generator=seeded(device, 14), device=device)[:rows]

    def run() -> list[Tensor]:
        return [qk_norm_rope_store(q, k, v, q_weight, k_weight, EPS, cos, sin, k_cache, v_cache, slots)]

    def check(outputs: Sequence[Tensor]) -> None:
        stored_k, stored_v = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
        check_equal("stored v", stored_v, v)
        q_in, k_in, c, s, q_out, k_out = _ends(q, k, cos, sin, outputs[0], stored_k)
        # Norm and RoPE round seven times in all, and RoPE's sum cancels.
        for name, x, weight, result in (("q", q_in, q_weight, q_out), ("k", k_in, k_weight, k_out)):
            truth = reference.apply_rope(reference.rms_norm(x, weight, EPS), c, s)
            check_close(name, result, truth, tolerance=8 * torch.finfo(dtype).eps)

    return RowCase(run, check, nbytes(qkv, q_weight, k_weight, cos, sin, slots, qkv))
