"""The comparisons of schedules by bytes, in a model's shapes: products, row kernels, and attention over pages.

    M rows, N columns, K the reduced dimension, E experts, k of each token, H hidden, V vocabulary, S sequences,
    B pages, Hq/Hkv heads, D head_dim.

Of products, every schedule that may be chosen is compared; of experts' products, every tile that a step may have, with
the dense product of each expert's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from evalengine.kernels import (
    attention,
    expert_matmul,
    kv_cache,
    layer_norm,
    log_softmax,
    log_softmax_parts,
    matmul,
    matmul_schedules,
    qkv,
    rms_norm,
    rope,
    softmax,
)
from evalengine.kernels.attention_batch import SharedBlocks
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.expert_groups import group
from evalengine.kernels.matmul_device import Gpu, gpu_of
from evalengine.kernels.matmul_schedules import MatmulSchedule
from evalengine.kernels.row_variants import RowVariants
from evalengine.kernels.shapes import LinearShape
from evalengine.verification import operands
from evalengine.verification.verdict import KernelsVerdict

# (new tokens, tokens) of each sequence, decodes first. Lengths lie on both sides of the borders of blocks (64) and
# chunks (1024).
SEQUENCES = ((1, 1), (1, 65), (1, 1024), (1, 2100), (1, 1217), (3, 3), (130, 130), (17, 1030), (67, 2111))
BEYOND = 67  # tokens by which a decode's sequence is longer than a window that is compared

EPS = 1e-6
PAGE = 64  # tokens: the engine's default, for which the kernel compared is the one that runs

# The most rows that are compared: more than any tile has. For a persistent schedule there are more where one of its
# programs needs them for a second tile.
MAX_ROWS = 1031


def verify_matmul(
    verdict: KernelsVerdict,
    shapes: Sequence[LinearShape],
    dtype: torch.dtype,
    device: torch.device,
    out_dtype: torch.dtype | None = None,
    most_rows: int = matmul_schedules.MAX_BUCKET,
    max_rows: int = MAX_ROWS,
) -> None:
    """x [M, K] times W^T, W [N, K]: every schedule that `choose` names for a shape, at an odd M of its own bucket.

    shapes: the weights; most_rows: the largest M that the engine has; max_rows: the largest M that is compared.
    """
    gpu = gpu_of(torch.empty(0, device=device).get_device())
    cases: list[tuple[str, Any, Callable[[], Tensor], Tensor]] = []
    for n, k, biased in shapes:
        chosen = _chosen(gpu, n, k, dtype, out_dtype or dtype, biased, most_rows, max_rows)
        random = operands.Random(dtype, device)
        a, weight = random(max(rows for _, rows in chosen), k), random(n, k)
        product = partial(matmul.matmul, b=weight.T, bias=random(n) if biased else None, out_dtype=out_dtype)
        expected = product(a, schedule=matmul.REFERENCE)
        for schedule, rows in chosen:
            where = f"M{rows} N{n} K{k} {dtype} to {out_dtype or dtype}{', with a bias' if biased else ''}"
            cases.append((where, schedule, partial(product, a[:rows], schedule=schedule), expected[:rows]))
    for where, schedule, run, expected in cases:
        verdict.compare("matmul", schedule, where, run, expected)


def _chosen(
    gpu: Gpu, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, biased: bool, most_rows: int, max_rows: int
) -> list[tuple[Any, int]]:
    """(schedule, rows) for every schedule of [n, k] and each way in which it runs: with masked rows or without, and, if
    persistent, with a second tile for a program where that occurs. The rows are odd, and those of the largest bucket
    for which the schedule is chosen, or `max_rows`.

    Schedules are chosen as for the engine's layers: with tensor descriptors wherever `matmul` makes them. A schedule
    that is excluded already is compared and dropped again, because this verdict must name it, too: other processes read
    it from the cache.
    """
    aligned = dtype != torch.float32 and k % 8 == 0 and n * out_dtype.itemsize % 16 == 0
    chosen = {}
    buckets = matmul_schedules.CUBLASLT_BUCKETS
    for bucket in buckets:
        if bucket > matmul_schedules.bucket(most_rows, buckets):
            break
        for schedule in matmul_schedules.preferred(gpu.name, dtype, bucket, n, k, *gpu.forms(aligned, not biased)):
            largest = min(max(1, bucket - 1), most_rows)
            looping = (rows for rows in range(schedule.block_m - 1, largest + 1, schedule.block_m)
                       if schedule.loops(rows, n, gpu.multiprocessors))  # fmt: skip
            rows = max(min(largest, max_rows), next(looping, 0))
            chosen[schedule, schedule.masks_rows(rows)] = rows
    return [(schedule, rows) for (schedule, _), rows in chosen.items()]


def verify_experts(
    verdict: KernelsVerdict, layers: dict[str, LinearShape], chosen: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The experts' products of a model whose tokens have k = `chosen` experts; layers: `Shapes.expert_layers`.

    There is one expert more than a token has, so that each has tiles that are full, one that is not, and rows that lie
    apart.
    """
    cases: list[tuple[str, MatmulSchedule, Callable[[], Tensor], Tensor]] = []
    for name, (n, k, biased) in layers.items():
        random = operands.Random(dtype, device)
        weight, bias = random(chosen + 1, n, k), random(chosen + 1, n) if biased else None
        for rows in expert_matmul.heights(dtype):
            tokens = 2 * rows + 3
            ids = _ids(tokens, chosen, device)
            x = random(tokens, k) if name == "gate_up_proj" else random(tokens, chosen, k)
            expected = _dense(x, weight, bias, ids)
            for schedule in (expert_matmul.preferred(dtype, rows, n), expert_matmul.plainest(rows)):
                product = partial(expert_matmul.expert_linear, x, weight, bias, group(ids, chosen + 1, rows), schedule)
                cases.append((f"experts' {name}, {tokens} tokens N{n} K{k} {dtype}", schedule, product, expected))
    for where, schedule, run, expected in cases:
        verdict.compare("experts", schedule, where, run, expected)
    for rows in expert_matmul.heights(dtype):
        if expert_matmul.plainest(rows) in expert_matmul.excluded:
            verdict.fail(f"experts' products, tiles of {rows} rows: the schedule in reserve differs or does not run")


def _ids(tokens: int, chosen: int, device: torch.device) -> Tensor:
    """int32 [T, k]: every token lacks one expert, each in turn."""
    first = torch.arange(tokens, dtype=torch.int32, device=device)[:, None]
    return (first + torch.arange(chosen, dtype=torch.int32, device=device)) % (chosen + 1)


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    y = torch.empty((*ids.shape, weight.shape[1]), dtype=x.dtype, device=x.device)
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1) if x.ndim == 2 else x
    for expert in range(len(weight)):
        own = ids == expert
        product = partial(matmul.matmul, rows[own], weight[expert].t(), None if bias is None else bias[expert])
        y[own] = product(schedule=matmul.REFERENCE)
    return y


def verify_rows(
    verdict: KernelsVerdict,
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
    """Compares fused kernels with their parts, many rows with one, and the schedules for rows of logits."""
    random = operands.Random(dtype, device)
    _verify_norm(verdict, random, hidden_size, rows, "rms_norm", rms_norm.rms_norm, rms_norm.add_rms_norm)
    _verify_log_softmax(verdict, random, vocab_size, most_logits)
    _verify_qkv(verdict, random, num_heads, num_kv_heads, head_dim, rows)


def verify_row_variants(
    verdict: KernelsVerdict,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    variants: RowVariants,
    rows: int = 37,
) -> None:
    """`verify_rows` for variants of row kernels: a model's norms, and RoPE's tables in float32."""
    random = operands.Random(dtype, device)
    of_heads: list[dict[str, Any]] = [{}] if variants.wide_rope else []
    for kind, offset, cast_first, with_bias in variants.norms:
        if kind == "layer of each head":
            _verify_head_norms(verdict, random, num_heads, head_dim, rows)
            continue
        if kind == "layer":
            name, bias = f"layer_norm, bias {with_bias},", random(hidden_size) if with_bias else None
            alone: Callable = partial(_layer_norm, bias=bias)
            fused: Callable = partial(_add_layer_norm, bias=bias)
        else:
            variant: dict[str, Any] = {"offset": offset, "cast_first": cast_first}
            name = f"rms_norm, offset {offset}, cast first {cast_first},"
            alone, fused = partial(rms_norm.rms_norm, **variant), partial(rms_norm.add_rms_norm, **variant)
            of_heads.append(variant)
        _verify_norm(verdict, random, hidden_size, rows, name, alone, fused)
    for variant in of_heads:
        _verify_qkv(verdict, random, num_heads, num_kv_heads, head_dim, rows, variant, variants.wide_rope)


def _verify_head_norms(
    verdict: KernelsVerdict, random: operands.Random, num_heads: int, head_dim: int, rows: int
) -> None:
    x, weight = random(rows, num_heads, head_dim), random(num_heads, head_dim)
    whole = layer_norm.layer_norm(x, weight, None, EPS)
    alone = [layer_norm.layer_norm(x[:, head], weight[head], None, EPS) for head in range(num_heads)]
    name = f"layer_norm of {num_heads} heads D{head_dim}"
    verdict.require_equal(f"{name} against each head", whole, torch.stack(alone, 1))
    single = layer_norm.layer_norm(x[-1:], weight, None, EPS)
    verdict.require_equal(f"{name}, {rows} rows against 1", whole[-1:], single)


def _layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
    return layer_norm.layer_norm(x, weight, bias, eps)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return layer_norm.add_layer_norm(x, residual, weight, bias, eps)


def _verify_norm(
    verdict: KernelsVerdict,
    random: operands.Random,
    hidden_size: int,
    rows: int,
    name: str,
    norm: Callable[[Tensor, Tensor, float], Tensor],
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]],
) -> None:
    x, residual, weight = random(rows, hidden_size), random(rows, hidden_size), random(hidden_size)
    normed, total = add_norm(x, residual, weight, EPS)
    parts = norm(x + residual, weight, EPS)
    verdict.require_equal(f"add_{name} H{hidden_size}: the sum", total, x + residual)
    verdict.require_equal(f"add_{name} H{hidden_size} against {name}", normed, parts)
    single = norm((x + residual)[-1:], weight, EPS)
    verdict.require_equal(f"{name} H{hidden_size}, {rows} rows against 1", parts[-1:], single)


def _verify_log_softmax(verdict: KernelsVerdict, random: operands.Random, vocab_size: int, most_logits: int) -> None:
    """Compares log_softmax of one row and of so many that resident programs have several chunks each, and
    `read_out`."""
    logits = random(min(1024, max(2, most_logits // vocab_size)), vocab_size).float() * 4
    whole = log_softmax.log_softmax(logits, _schedule=softmax.REFERENCE)
    for x, expected in ((logits, whole), (logits[-1:], whole[-1:])):
        schedule = softmax.preferred(x)
        run = partial(log_softmax.log_softmax, x, _schedule=schedule)
        verdict.compare("softmax", schedule, f"{len(x)} rows of {vocab_size}", run, expected)
    index, vocabulary = (torch.arange(n, device=logits.device) for n in logits.shape)
    columns = index * 7919 % vocab_size
    greedy = vocabulary.where(whole == whole.amax(1, keepdim=True), vocab_size).amin(1)
    for n in (len(logits), 1):
        for rows in (None, index[:n].flip(0)):
            tokens, logprobs = log_softmax.read_out(logits[:n], rows, columns[:n])
            expected = whole[index[:n] if rows is None else rows, columns[:n]]
            name = f"read_out V{vocab_size}, {n} rows, {'a column a row' if rows is None else 'any columns'}"
            verdict.require_equal(f"{name}, against log_softmax", logprobs, expected)
            verdict.require_equal(f"{name}: the greedy token", tokens.int(), greedy[:n].int())


def verify_parted_read_out(
    verdict: KernelsVerdict, vocabulary: Sequence[range], dtype: torch.dtype, device: torch.device, rows: int = 37
) -> None:
    """Compares `read_out` of logits that lie on several ranks, whose token ids are `vocabulary`, with one device's."""
    ranks, vocab_size = len(vocabulary), vocabulary[-1].stop
    logits = operands.Random(dtype, device)(rows, vocab_size).float() * 4
    index = torch.arange(rows, device=device)
    columns = index * 7919 % (vocab_size + 1) - 1
    parts = [logits[:, ids.start : ids.stop] for ids in vocabulary]
    statistics = torch.cat([log_softmax_parts.statistics(part) for part in parts], dim=2)
    results = [
        log_softmax_parts.read_out_part(part, statistics, ids.start, vocab_size, index, columns)
        for part, ids in zip(parts, vocabulary, strict=True)
    ]
    greedy, logprobs = log_softmax.read_out(logits, index, columns)
    name = f"read_out V{vocab_size} over {ranks} ranks, against one"
    greedy_sum, logprobs_sum = (torch.stack(parts_of).sum(0) for parts_of in zip(*results, strict=True))
    verdict.require_equal(name, logprobs_sum, logprobs)
    verdict.require_equal(f"{name}: the greedy token", greedy_sum.int(), greedy.int())


def _verify_qkv(
    verdict: KernelsVerdict,
    random: operands.Random,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rows: int,
    variant: Mapping[str, Any] = MappingProxyType({}),
    wide: bool = False,
) -> None:
    """variant: the norms' offset and cast_first; wide: cos and sin in float32."""
    q, k, v = random(rows, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    q_weight, k_weight = random(head_dim), random(head_dim)
    cos, sin = random(rows, head_dim // 2), random(rows, head_dim // 2)
    if wide:
        cos, sin = cos.float(), sin.float()
    words = "".join(f", {name} {value}" for name, value in variant.items()) + (", RoPE in float32" if wide else "")
    pages = 1 + -(-rows // PAGE)
    slots = torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(1))[:rows].to(q.device)
    for what, norms in (("with norms", (q_weight, k_weight)), ("without", (None, None))):
        caches = torch.zeros(2, 2, pages, PAGE, kv_heads, head_dim, dtype=q.dtype, device=q.device)
        fused, parts = caches[0], caches[1]
        own = (q, k, v, *norms, EPS, cos, sin, *fused, slots)
        rotated = qkv.qk_norm_rope_store(*own, **variant)
        q_normed, k_normed = (
            x if weight is None else rms_norm.rms_norm(x, weight, EPS, **variant)
            for x, weight in zip((q, k), norms, strict=True)
        )
        kv_cache.store_kv(rope.rope(k_normed, cos, sin), v, parts[0], parts[1], slots)
        name = f"qk_norm_rope_store D{head_dim} {what}{words}"
        verdict.require_equal(f"{name}: q", rotated, rope.rope(q_normed, cos, sin))
        verdict.require_equal(f"{name}: the KV cache", fused, parts)


@dataclass
class _Batch:
    """A batch as `attention.RaggedBatch` describes it."""

    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    num_decodes: int
    max_decode_kv_len: int
    shared: SharedBlocks | None = None
    plans: dict[Any, Any] = field(default_factory=dict)


def verify_attention(
    verdict: KernelsVerdict,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    variant: AttentionVariant,
    sequences: Sequence[tuple[int, int]] = SEQUENCES,
) -> None:
    """Compares every schedule on a batch of decodes and prefills over shuffled pages, whose slots past each end and
    before each window are NaN, and on its decodes of one chunk alone, so that nothing is merged; then decode against
    prefill. Without a window, the decodes have what they can in the longest one's pages, and a schedule that reads
    shared pages once does."""
    random = operands.Random(dtype, device)
    index = torch.empty(0, device=device).get_device()
    schedules = attention.schedules(head_dim, page_size, dtype, index)
    if variant.window is not None:
        sequences = _beyond(sequences, variant.window)
    if variant.is_plain and any(schedule.hopper for schedule in schedules):
        sequences = [*sequences, _second_tiles(num_heads // num_kv_heads, num_kv_heads, index)]
    table, caches = _paged(sequences, page_size, num_kv_heads, head_dim, variant.window, random)
    shares = variant.window is None and attention.CHUNK % page_size == 0
    if shares:
        _share(table, [length for rows, length in sequences if rows == 1], page_size)
    q = random(sum(rows for rows, _ in sequences), num_heads, head_dim)
    sinks = random(num_heads) if variant.sinks else None
    in_one_chunk = len(list(takewhile(lambda lens: lens[0] == 1 and lens[1] <= attention.CHUNK, sequences)))

    def run(schedule: Any, count: int, as_decodes: bool = True) -> Tensor:
        batch = _batch(sequences[:count], table, as_decodes)
        if shares and as_decodes:
            batch.shared = _shared_blocks([length for rows, length in sequences[:count] if rows == 1], page_size, table)
        # It runs twice, as two layers would: the second call repeats the launches of the first.
        own = (q[: sum(batch.query_lens)], (caches[0], caches[1]), batch, variant, sinks, schedule)
        return torch.stack([attention.paged_attention(*own) for _ in range(2)])

    where = f"D{head_dim} Hq{num_heads} Hkv{num_kv_heads} page {page_size} {dtype}" + f", {variant}".removesuffix(", ")
    counts = (len(sequences), in_one_chunk)
    try:
        expected = run(attention.REFERENCE, len(sequences))
    except OutOfResources as error:  # float32 with a head_dim of 256 on a GPU with little shared memory
        verdict.fail(f"attention ({where}): the reference schedule does not fit on this GPU: {error}")
        return
    for schedule in schedules:
        for count in counts:
            rows = sum(rows for rows, _ in sequences[:count])
            verdict.compare("attention", schedule, where, partial(run, schedule, count), expected[:, :rows])
    as_prefill = run(attention.REFERENCE, len(sequences), False)
    verdict.require_equal(f"attention, decode against prefill ({where})", as_prefill, expected)


def _beyond(sequences: Sequence[tuple[int, int]], window: int) -> list[tuple[int, int]]:
    """The sequences with a decode and a chunk of a prefill more, both of them longer than the window."""
    decodes = list(takewhile(lambda lens: lens[0] == 1, sequences))
    return [*decodes, (1, window + BEYOND), *sequences[len(decodes) :], (BEYOND, window + 2 * BEYOND)]


def _second_tiles(group: int, num_kv_heads: int, device: int) -> tuple[int, int]:
    """(new tokens, tokens) of a sequence with so many tiles that one of the Hopper kernel's programs (one an SM) has
    two."""
    from evalengine.kernels.attention_hopper import TILE

    tiles = gpu_of(device).multiprocessors // num_kv_heads + 1
    tokens = -(-tiles * TILE // group)
    return tokens, tokens + 65


def _paged(
    sequences: Sequence[tuple[int, int]],
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    random: operands.Random,
) -> tuple[Tensor, Tensor]:
    """A block table [S, pages] and the K and V pools [2, B, page_size, Hkv, D] behind it."""
    pages = [-(-length // page_size) for _, length in sequences]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
    like = random(1)
    caches = like.new_full((2, sum(pages), page_size, num_kv_heads, head_dim), float("nan"))
    table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    for i, (count, own) in enumerate(zip(pages, order.split(pages), strict=True)):
        (rows, length), table[i, :count] = sequences[i], own.int()
        positions = torch.arange(0 if window is None else max(0, length - rows + 1 - window), length)
        page, place = own[positions // page_size].to(like.device), (positions % page_size).to(like.device)
        caches[:, page, place] = random(2, len(positions), num_kv_heads, head_dim)
    return table.to(like.device), caches


def _share(table: Tensor, lengths: Sequence[int], page_size: int) -> None:
    """Gives the decodes, the first rows of the table, the longest one's pages for all blocks that they fill."""
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    for row, length in enumerate(lengths):
        pages = length // max(page_size, attention.BLOCK) * max(page_size, attention.BLOCK) // page_size
        table[row, :pages] = table[longest, :pages]


def _shared_blocks(lengths: Sequence[int], page_size: int, table: Tensor) -> SharedBlocks:
    """The blocks that decodes of these lengths share after `_share`: in each chunk one unit, of all that have as much
    in it as the second of them. Its tiles are of two, and one program is to take all of them."""
    unit, chunks = max(page_size, attention.BLOCK), -(-max(lengths) // attention.CHUNK)
    tokens = torch.zeros(len(lengths), chunks, dtype=torch.int32)
    tiles: list[tuple[int, int, int, int]] = []
    members: list[int] = []
    for chunk in range(chunks):
        before = chunk * attention.CHUNK
        whole = [min(length // unit * unit - before, attention.CHUNK) for length in lengths]
        shared = max(0, sorted(whole)[-2]) if len(whole) > 1 else 0
        rows = [row for row, own in enumerate(whole) if own >= shared > 0]
        tokens[rows, chunk] = shared
        for pair in (rows[first : first + 2] for first in range(0, len(rows), 2)):
            tiles.append((chunk, shared, len(members), len(pair)))
            members += pair
    listed = torch.tensor(tiles or [(0, 0, 0, 0)]), torch.tensor(members or [0]), torch.tensor([len(tiles)])
    on_device = [array.int().to(table.device) for array in listed]
    return SharedBlocks(on_device[0], on_device[1], on_device[2], tokens.to(table.device), most_tiles=1)


def _batch(sequences: Sequence[tuple[int, int]], table: Tensor, as_decodes: bool) -> _Batch:
    """A batch of the table's first sequences. With `as_decodes` its leading single rows are decodes, else all are
    prefills."""
    query_lens, kv_lens = ([lens[i] for lens in sequences] for i in range(2))
    starts = torch.tensor([0, *query_lens], device=table.device).cumsum(0).int()
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=table.device)
    decodes = [length for rows, length in takewhile(lambda lens: lens[0] == 1, sequences)] if as_decodes else []
    own = table[: len(sequences)]
    return _Batch(own, starts, lengths, query_lens, kv_lens, len(decodes), max(decodes, default=0))
