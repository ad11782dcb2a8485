"""The comparisons that `verify` is made of: products, attention and row kernels in a model's own shapes.

    M rows, N columns, K the reduced dimension; H hidden, I intermediate, V vocabulary, Hq/Hkv heads, D head_dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from evalengine.kernels import (
    attention,
    kv_cache,
    log_softmax,
    matmul,
    matmul_schedules,
    qkv,
    rms_norm,
    rope,
    softmax,
)
from evalengine.kernels.verdict import Verdict, count_differing

MAX_ROWS = 1031  # of a product: over any tile, and over the persistent forms' one tile for each SM
COMPILE_THREADS = min(16, os.cpu_count() or 1)  # each holds one output
BUCKETS = tuple(1 << i for i in range(matmul_schedules.MAX_BUCKET.bit_length()))
# (new tokens, tokens): decodes first. Borders of blocks (64) and chunks (1024) on both sides.
SEQUENCES = ((1, 1), (1, 65), (1, 1024), (1, 2100), (3, 3), (130, 130), (17, 1030), (67, 2111))
EPS = 1e-6


@dataclass
class _Batch:
    """An `attention.RaggedBatch`."""

    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    num_decodes: int
    max_decode_kv_len: int
    plans: dict[Any, Any] = field(default_factory=dict)


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
    max_rows = min(max_rows, most_rows)
    buckets = [bucket for bucket in BUCKETS if bucket <= matmul_schedules.bucket(most_rows)]
    cases: list[tuple[str, Any, Callable[[], Tensor], Tensor]] = []
    for n, k, biased in shapes:
        random = _Random(dtype, device)
        a, weight = random(max_rows, k), random(n, k)
        product = partial(matmul.matmul, b=weight.T, bias=random(n) if biased else None, out_dtype=out_dtype)
        expected = product(a, schedule=matmul.REFERENCE)
        for schedule, rows in _chosen(a, n, out_dtype or dtype, buckets).items():
            where = f"M{rows} N{n} K{k} {dtype} to {out_dtype or dtype}{', with a bias' if biased else ''}"
            cases.append((where, schedule, partial(product, a[:rows], schedule=schedule), expected[:rows]))
    _compile([run for _, _, run, _ in cases], device)
    for where, schedule, run, expected in cases:
        _compare_schedule(verdict, "matmul", schedule, where, run, expected)


def _chosen(a: Tensor, n: int, out_dtype: torch.dtype, buckets: Sequence[int]) -> dict[Any, int]:
    """Schedule -> rows of the largest bucket that it is chosen for, made odd, at most M; a [M, K].

    As the engine's layers call it: with tensor descriptors wherever `matmul` makes them. What is excluded already is
    compared, and dropped, again: this verdict must say so too, for the processes that read it from the cache.
    """
    gpu = matmul._gpu(a.get_device())
    k = a.shape[1]
    aligned = gpu.descriptors and a.dtype != torch.float32 and k % 8 == 0 and n * out_dtype.itemsize % 16 == 0
    chosen = {}
    for bucket in buckets:
        schedule = matmul_schedules._choose(gpu.name, a.dtype, bucket, n, k, aligned)
        chosen[schedule] = min(max(1, bucket - 1), len(a))
    return chosen


def verify_attention(
    verdict: Verdict,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    sequences: Sequence[tuple[int, int]] = SEQUENCES,
) -> None:
    """A batch of decodes and prefills over shuffled pages, slots past each end NaN; and decode against prefill."""
    random = _Random(dtype, device)
    pages = [-(-length // page_size) for _, length in sequences]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
    caches = torch.full((2, sum(pages), page_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    for i, (count, own) in enumerate(zip(pages, order.split(pages), strict=True)):
        length, table[i, :count] = sequences[i][1], own.int()
        positions = torch.arange(length)
        caches[:, own[positions // page_size].to(device), (positions % page_size).to(device)] = random(
            2, length, num_kv_heads, head_dim
        )
    query_lens, kv_lens = ([lens[i] for lens in sequences] for i in range(2))
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    q = random(int(starts[-1]), num_heads, head_dim)
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    decodes = [length for n, length in sequences if n == 1]

    def run(schedule: Any, as_decodes: bool = True) -> Tensor:
        split = (len(decodes), max(decodes)) if as_decodes else (0, 0)
        batch = _Batch(table.to(device), starts.int().to(device), lengths, query_lens, kv_lens, *split)
        # twice, as two layers would: the second repeats the launches of the first
        k_cache, v_cache = caches
        layers = [attention.paged_attention(q, k_cache, v_cache, batch, head_dim**-0.5, schedule) for _ in range(2)]
        return torch.stack(layers)

    where = f"D{head_dim} Hq{num_heads} Hkv{num_kv_heads} page {page_size} {dtype}"
    schedules = attention.schedules(head_dim, page_size, dtype, q.get_device())
    _compile([partial(run, schedule) for schedule in schedules], device)
    try:
        expected = run(attention.REFERENCE)
    except OutOfResources as error:  # float32 with a head_dim of 256 on a GPU with little shared memory
        verdict.fail(f"attention ({where}): the reference schedule does not fit on this GPU: {error}")
        return
    for schedule in schedules:
        _compare_schedule(verdict, "attention", schedule, where, partial(run, schedule), expected)
    verdict.require_equal(f"attention, decode against prefill ({where})", run(attention.REFERENCE, False), expected)


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
    random = _Random(dtype, device)
    x, residual, weight = random(rows, hidden_size), random(rows, hidden_size), random(hidden_size)
    normed, total = rms_norm.add_rms_norm(x, residual, weight, EPS)
    parts = rms_norm.rms_norm(x + residual, weight, EPS)
    verdict.require_equal(f"add_rms_norm H{hidden_size}: the sum", total, x + residual)
    verdict.require_equal(f"add_rms_norm H{hidden_size} against rms_norm", normed, parts)
    one = rms_norm.rms_norm((x + residual)[-1:], weight, EPS)
    verdict.require_equal(f"rms_norm H{hidden_size}, {rows} rows against 1", parts[-1:], one)

    _verify_log_softmax(verdict, random, vocab_size, most_logits)
    _verify_qkv(verdict, random, num_heads, num_kv_heads, head_dim, rows)


def _verify_log_softmax(verdict: Verdict, random: _Random, vocab_size: int, most_logits: int) -> None:
    """Of one row, and of so many that resident programs have several chunks each; and what is read out of logits."""
    logits = random(min(1024, max(2, most_logits // vocab_size)), vocab_size).float() * 4
    whole = log_softmax.log_softmax(logits, _schedule=softmax.REFERENCE)
    for x, expected in ((logits, whole), (logits[-1:], whole[-1:])):
        schedule = softmax._choose(x)
        run = partial(log_softmax.log_softmax, x, _schedule=schedule)
        _compare_schedule(verdict, "softmax", schedule, f"{len(x)} rows of {vocab_size}", run, expected)
    index, vocabulary = (torch.arange(n, device=logits.device) for n in logits.shape)
    columns = index * 7919 % vocab_size
    greedy = vocabulary.where(whole == whole.amax(1, keepdim=True), vocab_size).amin(1)
    for rows in (None, index.flip(0)):
        found, logprobs = log_softmax.read_out(logits, rows, columns)
        expected = whole[index if rows is None else rows, columns]
        name = f"read_out V{vocab_size}, {'a column a row' if rows is None else 'any columns'}"
        verdict.require_equal(f"{name}, against log_softmax", logprobs, expected)
        verdict.require_equal(f"{name}: the greedy token", found.int(), greedy.int())


def _verify_qkv(verdict: Verdict, random: _Random, heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
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


class _Random:
    """Seeded normal numbers on the device; every call gives others."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)


def _compile(runs: Sequence[Callable[[], Tensor]], device: torch.device) -> None:
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


def _compare_schedule(
    verdict: Verdict, kernel: str, schedule: Any, where: str, run: Callable[[], Tensor], expected: Tensor
) -> None:
    """Runs a schedule and drops it if a byte differs, or if it does not run at all (its tile may not fit this GPU)."""
    verdict.schedules.add((kernel, schedule))
    verdict.checked += 1
    try:
        different = count_differing(run(), expected)
    except torch.OutOfMemoryError:  # of the GPU, for the data: no fault of the schedule
        raise
    except Exception as error:
        verdict.lasting &= isinstance(error, OutOfResources)
        verdict.drop(kernel, schedule, where, f"does not run: {type(error).__name__}: {error}"[:300])
        return
    if different:
        verdict.drop(kernel, schedule, where, f"{different} of {expected.numel()} elements differ")
