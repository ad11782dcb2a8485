"""Estimators that tasks and reports share: numbers in, a number out."""

from __future__ import annotations

import math


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate from n samples of a document, `correct` of them right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.
    """
    assert 0 <= correct <= n and 1 <= k <= n
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
