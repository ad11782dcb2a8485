"""Chooses each token's experts from its logits: one program a token (`mixture_variant.Router` says what is computed).

    T tokens, E experts, k chosen by each.

Rounding points (`native`): everything is float32. The softmax is `softmax_parts`', the sigmoid is
1 / (1 + exp(-z)), score + choice bias is rounded, and so is the sum of a group's two best. The k weights are added in
order of rank, each sum rounded; offset, floor, quotient and scaling follow, each rounded; last, the dtype of the model
if the router says so. Comparisons alone decide the choice, so it has no order that a schedule could change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math, softmax_parts
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.mixture_variant import Router

_launches: dict[tuple, Replay] = {}


@triton.jit
def _take(values, open_columns, column, LAST: tl.constexpr):
    """The largest of the open columns of [1, n] values, and the lowest column that has it, [1] each."""
    top = tl.max(tl.where(open_columns, values, float("-inf")), 1)
    first = tl.min(tl.where(open_columns & (values == top[:, None]), column, LAST), 1)
    return top, tl.minimum(first, LAST)


@triton.jit
def _in_kept_groups(
    choice, inside, column, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr
):
    """Whether an expert is in one of the best groups, [1, n]."""
    group = column // (E // GROUPS)
    number = tl.arange(0, triton.next_power_of_2(GROUPS))[None, :]
    sums = tl.full(number.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = inside & (group == g)
        top, first = _take(choice, own, column, E - 1)
        if BEST == 2:
            second, _ = _take(choice, own & (column != first[:, None]), column, E - 1)
            top = top + second
        sums = tl.where(number == g, top[:, None], sums)
    kept = group < 0
    left = number < GROUPS
    for _ in tl.static_range(KEPT):
        top, first = _take(sums, left, number, GROUPS - 1)
        kept = kept | (group == first[:, None])
        left = left & (number != first[:, None])
    return kept & inside


@triton.jit
def _scores(z, m, norm, SCORES: tl.constexpr):
    if SCORES == "softmax":
        return softmax_parts.finish(z, m[:, None], softmax_parts.norm_term(m, norm, False)[:, None], False)
    if SCORES == "sigmoid":
        return tl.div_rn(tl.full(z.shape, 1.0, tl.float32), 1.0 + device_math.exp(-z))
    return z


@triton.jit
def _routing_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, stride,
    E: tl.constexpr, K: tl.constexpr, SCORES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr, LEAST: tl.constexpr, SCALING: tl.constexpr,
    DTYPE: tl.constexpr, SCORE_DTYPE: tl.constexpr,
):  # fmt: skip
    """A row that holds a NaN or an infinity takes the first k experts, with weights of NaN."""
    device_math.after_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(E))[None, :]
    inside = column < E
    z = tl.load(logits_ptr + row * stride + column, inside, float("-inf")).to(tl.float32)
    m, norm = softmax_parts.chunk_sum(z)
    # -inf, too: a product that gives it has met a number that is not finite, and a product of NaN may give it alone.
    bad = (tl.abs(m) == float("inf")) | (m != m) | (tl.min(tl.where(inside, z, 0.0), 1) == float("-inf"))
    scores = _scores(z, m, norm, SCORES).to(SCORE_DTYPE).to(tl.float32)
    choice = scores
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + column, inside, 0.0)
    choice = tl.where(bad[:, None], 0.0, choice)
    left = inside
    if GROUPS > 1:
        left = _in_kept_groups(choice, inside, column, E, GROUPS, KEPT, BEST)
    rank = tl.arange(0, triton.next_power_of_2(K))[None, :]
    ids = tl.zeros(rank.shape, tl.int32)
    weights = tl.zeros(rank.shape, tl.float32)
    total = tl.zeros(m.shape, tl.float32)
    best = total
    for r in tl.static_range(K):
        _, first = _take(choice, left, column, E - 1)
        weight = tl.sum(tl.where(column == first[:, None], scores, 0.0), 1)
        if SCORES == "logit":
            if r == 0:
                best = weight
            weight = device_math.exp(weight - best)
        total = total + weight
        ids = tl.where(rank == r, first[:, None], ids)
        weights = tl.where(rank == r, weight[:, None], weights)
        left = left & (column != first[:, None])
    if NORMED or SCORES == "logit":
        total = tl.maximum(total + OFFSET, LEAST)
        weights = tl.div_rn(weights, tl.broadcast_to(total[:, None], weights.shape))
    if SCALING != 1.0:
        weights = weights * SCALING
    weights = tl.where(bad[:, None], float("nan"), weights.to(DTYPE).to(tl.float32))
    tl.store(ids_ptr + row * K + rank, ids, rank < K)
    tl.store(weights_ptr + row * K + rank, weights, rank < K)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def route(logits: Tensor, choice_bias: Tensor | None, router: Router, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, E] of any row stride, float32 [E] -> experts int32 [T, k] by rank, weights float32 [T, k].

    dtype: the model's, to which weights are rounded if the router says so. E is at most 4096, a chunk of softmax.
    """
    tokens, k = logits.shape[0], router.chosen
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    key = (operand_key(logits), operand_key(choice_bias), router, dtype)
    if replayer := _launches.get(key):
        replayer(logits, ids, weights, *([] if choice_bias is None else [choice_bias]))
        return ids, weights
    assert logits.shape[1] == router.experts <= softmax_parts.CHUNK and logits.stride(1) == 1 and not router.problems
    constants = (
        router.experts, k, router.scores, router.groups, router.kept_groups, router.group_best, router.normed,
        router.sum_offset, router.least_sum, router.scaling, _DTYPES[dtype if router.rounded else torch.float32],
        _DTYPES[dtype if router.rounded_scores else torch.float32],
    )  # fmt: skip
    args = (logits, choice_bias, ids, weights, logits.stride(0))
    launched = launch(_routing_kernel, (tokens, 1, 1), args, constants, num_warps=1, num_stages=1)
    if launched:
        cache_launch(_launches, key, launched.replayer(0, 2, 3, *([] if choice_bias is None else [1])))
    return ids, weights
