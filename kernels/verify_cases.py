"""The comparisons that `verify` is made of: products and row kernels in a model's own shapes.

M rows, N columns, K the reduced dimension; H hidden, V vocabulary, Hq/Hkv heads, D head_dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels import (
    kv_cache,
    log_softmax,
    log_softmax_parts,
    matmul,
    matmul_schedules,
    qkv,
    rms_norm,
    rope,
    softmax,
    softmax_parts,
)
from evalengine.kernels.verdict import Verdict

MAX_ROWS = 1031  # of a product, unless a persistent program needs more for its second tile: over any tile
COMPILE_THREADS = min(16, os.cpu_count() or 1)  # each holds one output
EPS = 1e-6


def verify_matmul(
    verdict: Verdict,
    shapes: Sequence[tuple[int, int, bool]],
    dtype: torch.dtype,
    device: torch.device,
    out_dtype: torch.dtype | None = None,
    most_rows: int = matmul_schedules.MAX_BUCKET,
    max_rows: int = MAX_ROWS,
) -> None:
    """x [M, K] times W^T, W [N, K]: every schedule that `choose` names for a shape, at an odd M of its own bucket.

    shapes: (N, K, whether a bias is added); most_rows: the largest M that the engine has; max_rows: the largest that is
    compared.
    """
    gpu = matmul._gpu(torch.empty(0, device=device).get_device())
    cases: list[tuple[str, Any, Callable[[], Tensor], Tensor]] = []
    for n, k, biased in shapes:
        chosen = _chosen(gpu, n, k, dtype, out_dtype or dtype, biased, most_rows, max_rows)
        random = Random(dtype, device)
        a, weight = random(max(rows for _, rows in chosen), k), random(n, k)
        product = partial(matmul.matmul, b=weight.T, bias=random(n) if biased else None, out_dtype=out_dtype)
        expected = product(a, schedule=matmul.REFERENCE)
        for schedule, rows in chosen:
            where = f"M{rows} N{n} K{k} {dtype} to {out_dtype or dtype}{', with a bias' if biased else ''}"
            cases.append((where, schedule, partial(product, a[:rows], schedule=schedule), expected[:rows]))
    compile_all([run for _, _, run, _ in cases], device)
    for where, schedule, run, expected in cases:
        verdict.compare("matmul", schedule, where, run, expected)


def _chosen(
    gpu: Any, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, biased: bool, most_rows: int, max_rows: int
) -> list[tuple[Any, int]]:
    """(schedule, rows) for every schedule of [n, k] and way in which it goes: with masked rows or without, and a
    persistent one with a second tile for a program, if it ever has one. The rows are odd, and those of the largest
    bucket that it is chosen for, or `max_rows`.

    As the engine's layers call it: with tensor descriptors wherever `matmul` makes them. What is excluded already is
    compared, and dropped, again: this verdict must say so too, for the processes that read it from the cache.
    """
    aligned = dtype != torch.float32 and k % 8 == 0 and n * out_dtype.itemsize % 16 == 0
    chosen = {}
    for bucket in matmul_schedules.BUCKETS:
        if bucket > matmul_schedules.bucket(most_rows):
            break
        for schedule in matmul_schedules.preferred(gpu.name, dtype, bucket, n, k, *gpu.forms(aligned, not biased)):
            largest = min(max(1, bucket - 1), most_rows)
            looping = (rows for rows in range(schedule.block_m - 1, largest + 1, schedule.block_m)
                       if schedule.loops(rows, n, gpu.multiprocessors))  # fmt: skip
            rows = max(min(largest, max_rows), next(looping, 0))
            chosen[schedule, schedule.masks_rows(rows)] = rows
    return [(schedule, rows) for (schedule, _), rows in chosen.items()]


def verify_rows(
    verdict: Verdict,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: int = 37,
    most_logits: int = 1 << 24,
) -> None:
    """Fused kernels against their parts, many rows against one, and the schedules for rows of logits."""
    random = Random(dtype, device)
    x, residual, weight = random(rows, hidden_size), random(rows, hidden_size), random(hidden_size)
    normed, total = rms_norm.add_rms_norm(x, residual, weight, EPS)
    parts = rms_norm.rms_norm(x + residual, weight, EPS)
    verdict.require_equal(f"add_rms_norm H{hidden_size}: the sum", total, x + residual)
    verdict.require_equal(f"add_rms_norm H{hidden_size} against rms_norm", normed, parts)
    one = rms_norm.rms_norm((x + residual)[-1:], weight, EPS)
    verdict.require_equal(f"rms_norm H{hidden_size}, {rows} rows against 1", parts[-1:], one)

    _verify_log_softmax(verdict, random, vocab_size, most_logits)
    _verify_qkv(verdict, random, num_heads, num_kv_heads, head_dim, rows)


def _verify_log_softmax(verdict: Verdict, random: Random, vocab_size: int, most_logits: int) -> None:
    """Of one row, and of so many that resident programs have several chunks each; and what is read out of logits."""
    logits = random(min(1024, max(2, most_logits // vocab_size)), vocab_size).float() * 4
    whole = log_softmax.log_softmax(logits, _schedule=softmax.REFERENCE)
    for x, expected in ((logits, whole), (logits[-1:], whole[-1:])):
        schedule = softmax._choose(x)
        run = partial(log_softmax.log_softmax, x, _schedule=schedule)
        verdict.compare("softmax", schedule, f"{len(x)} rows of {vocab_size}", run, expected)
    index, vocabulary = (torch.arange(n, device=logits.device) for n in logits.shape)
    columns = index * 7919 % vocab_size
    greedy = vocabulary.where(whole == whole.amax(1, keepdim=True), vocab_size).amin(1)
    for n in (len(logits), 1):
        for rows in (None, index[:n].flip(0)):
            found, logprobs = log_softmax.read_out(logits[:n], rows, columns[:n])
            expected = whole[index[:n] if rows is None else rows, columns[:n]]
            name = f"read_out V{vocab_size}, {n} rows, {'a column a row' if rows is None else 'any columns'}"
            verdict.require_equal(f"{name}, against log_softmax", logprobs, expected)
            verdict.require_equal(f"{name}: the greedy token", found.int(), greedy[:n].int())


def verify_parted_read_out(
    verdict: Verdict, vocab_size: int, ranks: int, dtype: torch.dtype, device: torch.device, rows: int = 37
) -> None:
    """What is read out of logits that lie on several ranks, cut between chunks, against one device's."""
    logits = Random(dtype, device)(rows, vocab_size).float() * 4
    index = torch.arange(rows, device=device)
    columns = index * 7919 % (vocab_size + 1) - 1
    chunks = -(-vocab_size // softmax_parts.CHUNK)
    edges = [min(vocab_size, rank * chunks // ranks * softmax_parts.CHUNK) for rank in range(ranks + 1)]
    parts = [logits[:, first:end] for first, end in pairwise(edges)]
    statistics = torch.cat([log_softmax_parts.statistics(part) for part in parts], dim=2)
    found = [
        log_softmax_parts.read_out_part(part, statistics, first, vocab_size, index, columns)
        for part, first in zip(parts, edges, strict=False)
    ]
    greedy, logprobs = log_softmax.read_out(logits, index, columns)
    name = f"read_out V{vocab_size} over {ranks} ranks, against one"
    greedy_sum, logprobs_sum = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    verdict.require_equal(name, logprobs_sum, logprobs)
    verdict.require_equal(f"{name}: the greedy token", greedy_sum.int(), greedy.int())


def _verify_qkv(verdict: Verdict, random: Random, heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
    q, k, v = random(rows, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    q_weight, k_weight = random(head_dim), random(head_dim)
    cos, sin = random(rows, head_dim // 2), random(rows, head_dim // 2)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(q.device)
    for what, norms in (("with norms", (q_weight, k_weight)), ("without", (None, None))):
        shape = (2, -(-rows // 16), 16, kv_heads, head_dim)
        fused, parts = (torch.zeros(shape, dtype=q.dtype, device=q.device) for _ in range(2))
        rotated = qkv.qk_norm_rope_store(q, k, v, norms[0], norms[1], EPS, cos, sin, fused[0], fused[1], slots)
        q_normed, k_normed = (
            x if weight is None else rms_norm.rms_norm(x, weight, EPS) for x, weight in zip((q, k), norms, strict=True)
        )
        kv_cache.store_kv(rope.rope(k_normed, cos, sin), v, parts[0], parts[1], slots)
        name = f"qk_norm_rope_store D{head_dim} {what}"
        verdict.require_equal(f"{name}: q", rotated, rope.rope(q_normed, cos, sin))
        verdict.require_equal(f"{name}: the KV cache", fused, parts)


class Random:
    """Seeded normal numbers on the device; every call gives others."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)


def compile_all(runs: Sequence[Callable[[], Tensor]], device: torch.device) -> None:
    """Runs them side by side, so that Triton compiles on every core: one after another, a model's kernels take minutes.

    What fails here fails again, and is reported, when it is compared.
    """
    if device.type != "cuda":
        return

    def quietly(run: Callable[[], Tensor]) -> None:
        with suppress(Exception), torch.inference_mode(), torch.cuda.device(device):
            run()

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(quietly, runs))
