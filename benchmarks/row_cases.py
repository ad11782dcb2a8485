"""The cases of `rows`: a kernel on its inputs, the check of its outputs, and the bytes that it must move.

    T rows (tokens), Hq/Hkv heads, D head_dim.

Inputs are drawn from fixed seeds: two runs measure the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import check_close, check_equal, nbytes, seeded
from evalengine.kernels.activation import silu_and_mul
from evalengine.kernels.gumbel import gumbel_noise
from evalengine.kernels.kv_cache import store_kv
from evalengine.kernels.log_softmax import log_softmax, read_out
from evalengine.kernels.mean import mean
from evalengine.kernels.qkv import qk_norm_rope_store
from evalengine.kernels.rms_norm import add_rms_norm, rms_norm
from evalengine.kernels.rope import rope
from evalengine.kernels.sampling import sample
from tests.references import reference

EPS = 1e-6
PAGE = 64
CHECKED_ROWS = 32  # rows checked at each end
CHECKED_NOISE = 64  # columns of noise checked: the reference is Python's, which takes 10 us a number


@dataclass(frozen=True)
class RowCase:
    """One kernel on one shape: `run` launches it, `check` raises WrongResult, `num_bytes` is what it must move."""

    run: Callable[[], Sequence[Tensor]]
    check: Callable[[Sequence[Tensor]], None]
    num_bytes: int


def _ends(*tensors: Tensor) -> list[Tensor]:
    """The first and the last rows of each tensor, which are compared with float64."""
    return [torch.cat((t[:CHECKED_ROWS], t[-CHECKED_ROWS:])) for t in tensors]


def _normal(device: torch.device, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(device, seed), dtype=dtype, device=device)


def of_rms_norm(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    x, weight = _normal(device, 1, rows, hidden, dtype=dtype), _normal(device, 2, hidden, dtype=dtype)

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, normed = _ends(x, outputs[0])
        check_close("rms_norm", normed, reference.rms_norm(inputs, weight, EPS))
        assert outputs[0].isfinite().all()

    return RowCase(lambda: [rms_norm(x, weight, EPS)], check, nbytes(x, weight, x))


def of_add_rms_norm(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    x, residual = (_normal(device, seed, rows, hidden, dtype=dtype) for seed in (3, 4))
    weight = _normal(device, 5, hidden, dtype=dtype)

    def check(outputs: Sequence[Tensor]) -> None:
        check_equal("residual sum", outputs[1], x + residual)
        normed, total = _ends(*outputs)
        check_close("rms_norm of the sum", normed, reference.rms_norm(total, weight, EPS))

    return RowCase(lambda: add_rms_norm(x, residual, weight, EPS), check, nbytes(x, residual, weight, x, x))


def of_mean(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    x = _normal(device, 15, rows, hidden, dtype=dtype).add_(1)  # One is added so that a sum's terms do not cancel.

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, result = _ends(x, outputs[0])
        check_close("mean", result, reference.mean(inputs, 1))
        assert outputs[0].isfinite().all()

    return RowCase(lambda: [mean(x, 1)], check, nbytes(x, x[:, 0]))


def of_softmax(function: Callable[[Tensor], Tensor], rows: int, vocab: int, device: torch.device) -> RowCase:
    logits = _normal(device, 6, rows, vocab)
    truth = reference.log_softmax if function is log_softmax else reference.softmax

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, result = _ends(logits, outputs[0])
        check_close(function.__name__, result, truth(inputs))

    return RowCase(lambda: [function(logits)], check, nbytes(logits, logits))


def of_read_out(rows: int, vocab: int, device: torch.device) -> RowCase:
    logits = _normal(device, 7, rows, vocab)
    targets = torch.randint(0, vocab, (rows,), generator=seeded(device, 8), device=device)

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, columns, greedy, logprobs = _ends(logits, targets, *outputs)
        check_equal("greedy id", greedy, inputs.argmax(-1))
        check_close("logprob", logprobs, reference.log_softmax(inputs).gather(1, columns[:, None]).squeeze(1))

    return RowCase(lambda: read_out(logits, None, targets), check, nbytes(logits, targets, targets, logits[:, 0]))


def _requests(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A noise key of 64 bits and a position for each row."""
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=seeded(device, 16), device=device)
    return keys, torch.randint(0, 1 << 15, (rows,), generator=seeded(device, 17), device=device)


def of_gumbel_noise(rows: int, vocab: int, device: torch.device) -> RowCase:
    keys, positions = _requests(rows, device)

    def check(outputs: Sequence[Tensor]) -> None:
        some_keys, some_positions, noise = _ends(keys, positions, outputs[0])
        columns = min(vocab, CHECKED_NOISE)  # A token's noise does not depend on the vocabulary's size.
        truth = reference.gumbel_noise(some_keys, some_positions, columns)
        check_close("noise", noise[:, :columns], truth, tolerance=1e-13)
        assert outputs[0].isfinite().all()

    noise_bytes = rows * vocab * 8
    return RowCase(lambda: [gumbel_noise(keys, positions, vocab)], check, nbytes(keys, positions) + noise_bytes)


def of_sample(rows: int, vocab: int, top_k: int, top_p: float, device: torch.device) -> RowCase:
    """Its bytes are a floor: the logprobs once, a key and a position a row, a token id a row.

    No CUDA graph holds it: the settings are copied from the host, from memory that is not pinned.
    """
    logprobs = _normal(device, 18, rows, vocab).log_softmax(-1)
    keys, positions = _requests(rows, device)
    temperatures, top_ks, top_ps = (  # They lie on the host, as in the engine.
        torch.full((rows,), value, dtype=dtype)
        for value, dtype in ((0.7, torch.float64), (top_k, torch.int64), (top_p, torch.float64))
    )

    def run() -> list[Tensor]:
        return [sample(logprobs, temperatures, top_ks, top_ps, keys, positions)]

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, some_keys, some_positions, tokens = _ends(logprobs, keys, positions, outputs[0])
        temperature, k, p = _ends(temperatures, top_ks, top_ps)
        noise = gumbel_noise(some_keys, some_positions, vocab)  # The noise is checked in its own case.
        check_equal("token", tokens, reference.sample(inputs, temperature, k, p, noise))

    return RowCase(run, check, nbytes(logprobs, keys, positions, positions))


def of_silu_and_mul(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> RowCase:
    gate_up = _normal(device, 9, rows, 2 * width, dtype=dtype)

    def check(outputs: Sequence[Tensor]) -> None:
        inputs, result = _ends(gate_up, outputs[0])
        check_close("silu_and_mul", result, reference.silu_and_mul(inputs))

    return RowCase(lambda: [silu_and_mul(gate_up)], check, nbytes(gate_up, gate_up[:, :width]))


def _qkv(
    rows: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D]: views of one tensor, as the qkv projection leaves them."""
    q_heads, kv_heads, dim = heads
    qkv = _normal(device, 10, rows, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = qkv.unflatten(1, (-1, dim)).split([q_heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def _tables(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] of angles from 0 to 2 pi."""
    angles = torch.rand(rows, dim // 2, generator=seeded(device, 13), device=device) * 6.2832
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _pools(
    rows: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools for k and v of at least twice the slots, NaN throughout, and the slots of T tokens, shuffled."""
    pages = -(-2 * rows // PAGE)
    k_cache, v_cache = (torch.full((pages, PAGE, kv_heads, dim), torch.nan, dtype=dtype, device=device) for _ in "kv")
    return k_cache, v_cache, torch.randperm(pages * PAGE, generator=seeded(device, 14), device=device)[:rows]


def of_rope(rows: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> RowCase:
    q = _qkv(rows, heads, dtype, device)[0]
    cos, sin = _tables(rows, heads[2], dtype, device)

    def check(outputs: Sequence[Tensor]) -> None:
        truth = reference.apply_rope(*_ends(q, cos, sin))
        check_close("RoPE", _ends(outputs[0])[0], truth)
        assert outputs[0].isfinite().all()

    return RowCase(lambda: [rope(q, cos, sin)], check, nbytes(q, cos, sin, q))


def of_store_kv(rows: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> RowCase:
    """The outputs are the pools, which hold NaN before the kernel and, in slots that it is not given, after it."""
    _, k, v = _qkv(rows, heads, dtype, device)
    k_cache, v_cache, slots = _pools(rows, *heads[1:], dtype, device)

    def run() -> list[Tensor]:
        store_kv(k, v, k_cache, v_cache, slots)
        return [k_cache, v_cache]

    def check(outputs: Sequence[Tensor]) -> None:
        empty_k, empty_v = (torch.full_like(pool, torch.nan) for pool in outputs)
        truths = reference.store_kv(k, v, empty_k, empty_v, slots)
        for name, pool, truth in zip(("k pool", "v pool"), outputs, truths, strict=True):
            check_equal(f"{name}, NaN", pool.isnan(), truth.isnan())
            check_equal(name, pool.nan_to_num(), truth.nan_to_num())

    return RowCase(run, check, nbytes(k, v, slots, k, v))


def of_qk_norm_rope_store(rows: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> RowCase:
    """The norms' weights are drawn around 1."""
    _, kv_heads, dim = heads
    q, k, v = _qkv(rows, heads, dtype, device)
    q_weight, k_weight = (1 + 0.1 * _normal(device, seed, dim, dtype=dtype) for seed in (11, 12))
    cos, sin = _tables(rows, dim, dtype, device)
    k_cache, v_cache, slots = _pools(rows, kv_heads, dim, dtype, device)

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

    return RowCase(run, check, nbytes(q, k, v, q_weight, k_weight, cos, sin, slots, q, k, v))
