"""Mixtures of experts in plain torch, for `fast` on a CPU or on CUDA without Triton.

T tokens, E experts, k chosen by each token, K input features, N output features, I intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels.exact_mixture import best, within_groups
from evalengine.kernels.mixture_variant import Router


def route(
    logits: Tensor, choice_bias: Tensor | None, router: Router, dtype: torch.dtype, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[T, E], float32 [E] -> experts int64 [T, k] by rank, weights float32 [T, k], rounded to `dtype` if the router
    says so. ids: a choice that was made elsewhere."""
    scores = logits.float()
    if router.scores == "softmax":
        scores = scores.softmax(-1)
    elif router.scores == "sigmoid":
        scores = scores.sigmoid()
    if router.rounded_scores:
        scores = scores.to(dtype).float()
    if ids is None:
        ids = best(within_groups(scores if choice_bias is None else scores + choice_bias, router), router.chosen)
    weights = scores.gather(1, ids)
    if router.scores == "logit":
        weights = weights.softmax(-1)
    elif router.normed:
        weights = weights / (weights.sum(-1, keepdim=True) + router.sum_offset).clamp(min=router.least_sum)
    weights = weights * router.scaling
    return ids, weights.to(dtype).float() if router.rounded else weights


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """[T, K], or [T, k, K] for a row a choice; [E, N, K], [E, N], int64 [T, k] -> [T, k, N], one expert after
    another."""
    out = torch.empty(*ids.shape, weight.shape[1], dtype=x.dtype, device=x.device)
    for expert in ids.unique().tolist():
        token, rank = (ids == expert).nonzero(as_tuple=True)
        rows = x[token] if x.ndim == 2 else x[token, rank]
        out[token, rank] = F.linear(rows, weight[expert], None if bias is None else bias[expert])
    return out


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within -7 and 7."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
