"""What the tests of paired statistics share: counts of wins, losses and ties as scores, and McNemar by counting."""

from __future__ import annotations

import math
from fractions import Fraction


def binary(wins: int, losses: int, ties: int) -> tuple[list[int], list[int]]:
    """The 0/1 scores of an old and a new run, of which the new one has so many wins, losses and ties."""
    return [0] * wins + [1] * losses + [1] * ties, [1] * wins + [0] * losses + [1] * ties


def exact_mcnemar(wins: int, losses: int) -> tuple[Fraction, Fraction]:
    """The p-values (two-sided, one-sided for losses) by counting: every discordant pair is a fair coin."""
    m = wins + losses
    upper = Fraction(sum(math.comb(m, k) for k in range(losses, m + 1)), 2**m)
    larger = Fraction(sum(math.comb(m, k) for k in range(max(wins, losses), m + 1)), 2**m)
    return min(Fraction(1), 2 * larger), upper
