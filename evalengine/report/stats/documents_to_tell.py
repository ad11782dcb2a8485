"""How many documents would show a difference of two runs as large as the one that was seen."""

from __future__ import annotations

import math

import scipy

from evalengine.report.stats.paired import PairedResult
from evalengine.report.stats.power import mcnemar_power

MOST = 100_000_000  # no set of documents is larger


def documents_to_tell(p: PairedResult, alpha: float = 0.05, power: float = 0.8) -> int | None:
    """The fewest documents like these on which the two-sided test finds, with probability `power`, a difference that is
    as large as the observed one; None where none was observed, or more than `MOST` would be needed.

    For McNemar's test by its exact power at the observed share of pairs that differ (`power.mcnemar_power`); for others
    n (z_alpha/2 + z_power)^2 stderr^2 / difference^2 (Miller 2024, arXiv:2411.00640, power analysis).
    """
    size = abs(p.difference)
    if size == 0 or not math.isfinite(p.stderr):
        return None
    if p.test != "mcnemar-exact":
        quantiles = -float(scipy.special.ndtri(alpha / 2)) + float(scipy.special.ndtri(power))
        needed = p.n * (quantiles * p.stderr / size) ** 2
        return math.ceil(needed) if needed <= MOST else None
    discordance = (p.wins + p.losses) / p.n

    def enough(count: int) -> bool:
        return mcnemar_power(count, discordance, min(size, discordance), alpha) >= power

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
