"""The rules by which families choose experts, and logits with ties."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels.mixture_variant import Router

ROUTERS = {
    "qwen": Router(12, 4, normed=True),
    "qwen, as they are": Router(12, 4),
    "mixtral": Router(8, 2, normed=True, rounded=False),
    "gpt-oss": Router(12, 4, scores="logit", bias=True),
    "glm": Router(12, 3, "sigmoid", True, choice_bias=True, groups=4, kept_groups=2, normed=True, sum_offset=1e-20,
                  scaling=2.5, rounded=False),
    "deepseek v2": Router(12, 3, wide=True, groups=4, kept_groups=2, group_best=1, scaling=16.0, rounded=False),
    "lfm2": Router(12, 4, "sigmoid", choice_bias=True, normed=True, sum_offset=1e-6, scaling=0.5, rounded_scores=True),
    "minimax": Router(12, 4, "sigmoid", choice_bias=True, normed=True, rounded=False),
    "ernie": Router(12, 4, wide=True, choice_bias=True, normed=True, least_sum=1e-12),
    "one group of three": Router(9, 3, choice_bias=True, groups=3, kept_groups=1),
    "all": Router(5, 5, normed=True),
    "one": Router(7, 1),
}  # fmt: skip


def operands(router: Router, tokens: int = 23, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Logits [T, E] of few distinct values, so that most rows have ties, and the choice bias, in steps as coarse."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, router.experts, generator=generator) * 4).round() / 2
    logits[0] = 0.5  # all alike: the first experts
    logits[1:].view(-1)[::7] -= 0.25
    bias = torch.randn(router.experts, generator=generator).round() / 4 if router.choice_bias else None
    return logits, bias
