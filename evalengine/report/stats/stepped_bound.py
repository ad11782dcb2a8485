"""The bound of a loss that may be looked at after every document: a gate in steps ends where it is decided.

A bet against "the mean loss is at least the margin": the capital starts at 1 and is multiplied by 1 + bet * gain at
each document, whose gain is margin - loss. If the claim holds, it is expected never to grow, whatever bets are chosen
from the documents before, so that it ever reaches 1 / alpha with probability alpha at most (Ville 1939, "Etude critique
de la notion de collectif"). Betting for bounded means: Waudby-Smith & Ramdas 2024, "Estimating means of bounded random
variables by betting", Journal of the Royal Statistical Society B 86(1).

Half of alpha is spent so at every document, and half on the bound of the whole set (`loss_bound`), if all are asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from evalengine.report.stats.intervals import Floats
from evalengine.report.stats.loss_bound import LossBound

LARGEST_BET = 0.99  # of the capital; all of it could be lost at one document
UNSEEN = 0.5  # squared loss of the one document that is thought of before the first: it makes the first bets small


@dataclass(frozen=True, eq=False, kw_only=True)
class SteppedBound(LossBound):
    """`LossBound` for documents that were asked in a random order until something was decided. `alpha` is that of all
    looks together; losses must lie in [-1, 1]."""

    sums: Floats  # [G] each cluster's losses, in the order in which they were asked; empty: nothing can be bet on
    sizes: Floats  # [G] documents of each cluster
    largest: float  # documents of the largest cluster of the whole set, known before the first
    whole: LossBound | None  # the bound of the whole set at alpha / 2; None before all documents are asked

    @property
    def bound(self) -> float:
        needed, low, high = math.log(2 / self.alpha), -0.999, 0.999

        def reached(margin: float) -> float:
            return self._capital(margin, -1) - needed

        at_whole = math.inf if self.whole is None else self.whole.bound
        if not reached(high) > 0:
            return min(self.most, at_whole)
        least = low if reached(low) > 0 else float(scipy.optimize.brentq(reached, low, high, xtol=1e-9))
        return min(self.most, least, at_whole)

    def p_above(self, margin: float) -> float:
        """As `LossBound.p_above`, after as many looks as there are documents: twice the lesser of its p at the whole
        set and 1 / capital."""
        return self._p(self._capital(margin, 1), None if self.whole is None else self.whole.p_above(margin))

    def p_beyond(self, margin: float) -> float:
        """As `LossBound.p_beyond`, after as many looks as there are documents."""
        within = self._p(self._capital(margin, -1), None if self.whole is None else self.whole.p_beyond(margin))
        return within if within <= 0.5 else max(0.5, 1 - self.p_above(margin))

    def _p(self, capital: float, whole: float | None) -> float:
        return min(1.0, 2 * math.exp(-capital), 1.0 if whole is None or math.isnan(whole) else 2 * whole)

    def _capital(self, margin: float, sign: int) -> float:
        """Logarithm of the largest capital so far. sign: -1 bets on a loss below the margin, 1 on one above.

        The bet is Kelly's for the gain that is expected, gain / (variance + gain^2): with sign -1 that of no loss at
        all, else the mean of the gains so far.
        """
        if not len(self.sums):
            return 0.0
        gains = sign * (self.sums - margin * self.sizes) / (self.largest * (1 + sign * margin))  # at least -1
        before = np.arange(1, len(gains) + 1)  # documents before each, and the one that is thought of
        squares = (UNSEEN + _before(gains**2)) / before
        typical = _before(self.sizes) / np.maximum(1, before - 1) * margin / (self.largest * (1 - margin))
        expected = typical if sign < 0 else _before(gains) / before
        bets = np.clip(expected / (squares + expected**2), 0.0, LARGEST_BET)
        return max(0.0, float(np.max(np.cumsum(np.log1p(bets * gains)))))


def _before(values: Floats) -> Floats:
    """The sum of the values before each."""
    return np.concatenate(([0.0], np.cumsum(values)[:-1]))
