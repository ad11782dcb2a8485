"""The comparisons of row kernels, in a model's own shapes.

H hidden, V vocabulary, Hq/Hkv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels import kv_cache, layer_norm, log_softmax, log_softmax_parts, qkv, rms_norm, rope, softmax
from evalengine.kernels.row_variants import RowVariants
from evalengine.verification import operands
from evalengine.verification.verdict import KernelsVerdict

EPS = 1e-6


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
    """`verify_rows` for what row kernels compute beside Llama's: a model's norms, and RoPE's tables in float32."""
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
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(q.device)
    for what, norms in (("with norms", (q_weight, k_weight)), ("without", (None, None))):
        shape = (2, -(-rows // 16), 16, kv_heads, head_dim)
        fused, parts = (torch.zeros(shape, dtype=q.dtype, device=q.device) for _ in range(2))
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
