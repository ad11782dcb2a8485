"""The `exact` level's mixtures of experts: the choice, the products of each token's experts, and their weighted sum.

    T tokens, E experts, k chosen by each token, K input features, N output features, H hidden.

A product of a token with an expert is the dense product (`exact.linear`), so neither the other tokens of the expert nor
the order in which experts are computed can change a bit. Everything else is float64, rounded to float32 once an op.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evalengine.kernels import exact
from evalengine.kernels import exact_math as em
from evalengine.kernels.exact import ExactWeight
from evalengine.kernels.mixture_variant import Router


def sigmoid(x: Tensor) -> Tensor:
    """Any shape -> float32."""
    return exact.elementwise(em.sigmoid, x)


def route(logits: Tensor, choice_bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """float32 [T, E], [E] -> experts int64 [T, k] by rank, weights float32 [T, k]; see `Router`.

    Scores are rounded to float32, and so is score + choice bias: what is compared is what other levels could compare.
    Sums over k weights are taken in float64, in order of rank.
    """
    scores = _scores(logits, router)
    choice = scores if choice_bias is None else exact.add(scores, choice_bias.expand_as(scores))
    ids = best(within_groups(choice, router), router.chosen)
    weights = em.widen(scores.gather(1, ids))
    if router.scores == "logit":
        weights = em.exp(weights - weights[:, :1])
    if router.scores == "logit" or router.normed:
        weights.mul_(em.reciprocal(_row_total(weights).add_(router.sum_offset).clamp_(min=router.least_sum)))
    return ids, em.round_float32(weights.mul_(router.scaling))


def _scores(logits: Tensor, router: Router) -> Tensor:
    if router.scores == "softmax":
        return exact.softmax(logits)
    return sigmoid(logits) if router.scores == "sigmoid" else logits


def _row_total(x: Tensor) -> Tensor:
    """[T, k] -> [T, 1]: the sum from the left."""
    total = x[:, :1].clone()
    for column in range(1, x.shape[1]):
        total.add_(x[:, column : column + 1])
    return total


def best(x: Tensor, count: int) -> Tensor:
    """[T, n] -> int64 [T, count]: the columns of the largest numbers, in descending order, equals in ascending order;
    NaN counts as the largest."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :count]


def within_groups(choice: Tensor, router: Router) -> Tensor:
    """float32 [T, E] -> a copy in which experts outside of the selected groups are -inf; as it is without groups."""
    if router.groups == 1:
        return choice
    grouped = choice.unflatten(1, (router.groups, -1))
    top = torch.sort(grouped, dim=-1, descending=True).values
    quality = top[..., 0] if router.group_best == 1 else exact.add(top[..., 0], top[..., 1])
    selected = best(quality, router.kept_groups)
    hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, selected, False)
    return grouped.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1)


def expert_linear(x: Tensor, weights: Sequence[ExactWeight], bias: Tensor | None, ids: Tensor) -> Tensor:
    """[T, K], or [T, k, K] for a row a choice; E weights [N, K], bias [E, N], int64 [T, k] -> float32 [T, k, N]."""
    out = torch.empty(*ids.shape, weights[0].limb.shape[0], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, rank = (ids == expert).nonzero(as_tuple=True)
        rows = x[token] if x.ndim == 2 else x[token, rank]
        out[token, rank] = exact.linear(rows, weights[expert], None if bias is None else bias[expert])
    return out


def combine(x: Tensor, weights: Tensor) -> Tensor:
    """[T, k, H], float32 [T, k] -> float32 [T, H]: the sum over k of weight * row, in order of rank."""
    tokens, chosen, hidden = x.shape
    out = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    for tile in em.tiles(tokens, chosen * hidden):
        terms = em.widen(x[tile]).mul_(em.widen(weights[tile]).unsqueeze(-1))
        total = terms[:, 0]
        for rank in range(1, chosen):
            total.add_(terms[:, rank])
        em.store_float32(total, out[tile])
    return out


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """[T, H], and [T, 1] or [T, H] -> float32 [T, H]: x * sigmoid(logit), one rounding."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for tile in em.tiles(*x.shape):
        em.store_float32(em.widen(x[tile]).mul_(em.sigmoid(em.widen(logits[tile]))), out[tile])
    return out


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> float32 [T, I]: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within -7 and 7."""
    tokens, width = gate_up.shape[0], gate_up.shape[-1] // 2
    out = torch.empty(tokens, width, dtype=torch.float32, device=gate_up.device)
    for tile in em.tiles(tokens, width):
        bounded = em.widen(gate_up[tile, :width]).clamp_(max=7.0)
        up = em.widen(gate_up[tile, width:]).clamp_(-7.0, 7.0).add_(1.0)
        em.store_float32(em.sigmoid(bounded * 1.702).mul_(bounded).mul_(up), out[tile])
    return out
