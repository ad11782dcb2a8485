"""The results that lm-eval computes from documents' log-likelihoods and their numbers of words or bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evalengine.report.numbers import exact_sum

Pairs = Sequence[tuple[float, float]]


def perplexity(pairs: Pairs) -> float:
    """exp of minus the log-likelihood per word or byte (lm-eval's `weighted_perplexity`); infinite on overflow."""
    try:
        return math.exp(-_per_unit(pairs))
    except OverflowError:
        return math.inf


def bits_per_byte(pairs: Pairs) -> float:
    """Minus the log-likelihood per byte in bits (lm-eval's `bits_per_byte`)."""
    return -_per_unit(pairs) / math.log(2)


def _per_unit(pairs: Pairs) -> float:
    total = exact_sum(weight for _, weight in pairs)
    return exact_sum(value for value, _ in pairs) / total if total else math.nan
