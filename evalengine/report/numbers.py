"""Sums and comparisons of numbers that need not be finite, as runs may hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable


def exact_sum(values: Iterable[float]) -> float:
    """math.fsum; nan for infinities of both signs, which fsum refuses."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def same_number(x: float, y: float) -> bool:
    """Equality under which NaN equals NaN."""
    return x == y or (math.isnan(x) and math.isnan(y))
