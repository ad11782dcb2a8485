"""One figure of `benchmarks statistics`, and how simulated ones are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Draw = Callable[[np.random.Generator], tuple[bool, ...]]


@dataclass(frozen=True)
class Figure:
    """How often something happened. `at_least` and `at_most` are the claim; both None: shown for comparison."""

    group: str
    what: str
    case: str
    share: float
    draws: int | None  # simulated outcomes; None: all outcomes are counted
    at_least: float | None = None
    at_most: float | None = None

    @property
    def error(self) -> float:
        """Three standard errors of the share."""
        return 0.0 if self.draws is None else 3 * math.sqrt(max(self.share * (1 - self.share), 1e-4) / self.draws)

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds within three standard errors; None without a claim."""
        if self.at_least is None and self.at_most is None:
            return None
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low - self.error <= self.share <= high + self.error


def shares(rng: np.random.Generator, draws: int, draw: Draw) -> list[float]:
    total = np.zeros(len(draw(np.random.default_rng(0))))
    for _ in range(draws):
        total += draw(rng)
    return [float(share) for share in total / draws]
