"""What a comparison could have seen: the power of McNemar's test and the minimum detectable effect, which is never 0.

`sides` is 2 for a difference in either direction and 1 for a loss alone.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

TAIL = 1e-12  # probability that sums over a binomial distribution leave out on each side


def mcnemar_power(count: int, discordance: float, difference: float, alpha: float, sides: int = 2) -> float:
    """Probability that exact McNemar on `count` pairs has p <= alpha and the right sign.

    Unconditional and exact, summed over the number m of discordant pairs (Duffy 1984, "Asymptotic and Exact Power for
    the McNemar Test", Biometrics 40(4)): m ~ Binomial(count, discordance), and losses ~ Binomial(m, (discordance +
    difference) / (2 discordance)). `discordance` is the probability that a pair differs, `difference` that of a loss
    minus that of a win, 0 < difference <= discordance <= 1. `alpha` is halved for two sides.
    """
    pairs = scipy.stats.binom(count, discordance)
    m = np.arange(int(pairs.ppf(TAIL)), int(pairs.isf(TAIL)) + 1)
    most_accepted = scipy.stats.binom.isf(alpha / sides, m, 0.5)  # losses above this many are significant
    losses = scipy.stats.binom(m, min(1.0, (discordance + difference) / (2 * discordance)))
    return float(np.sum(pairs.pmf(m) * losses.sf(most_accepted)))


def binary_effect(count: int, discordance: float, alpha: float, power: float, sides: int = 2) -> float:
    """Smallest difference of two paired proportions, in (0, 1], that exact McNemar finds with probability `power`.

    At the observed `discordance` (share of pairs that differ), raised to the difference itself where the difference
    needs more pairs than that: a run that only loses. So nothing differing gives no 0 but the share at which the
    fewest pairs that can be significant (6 at alpha = 0.05 on two sides) differ often enough, about 7.9 / count at
    80 % power: the rule of three for a test. inf: no difference can be significant with so few pairs.
    """

    def missing(difference: float) -> float:
        return mcnemar_power(count, max(discordance, difference), difference, alpha, sides) - power

    if missing(1.0) < 0:
        return math.inf
    return float(scipy.optimize.brentq(missing, min(1e-9, 0.01 / count), 1.0, xtol=1e-12, rtol=1e-9))


def mean_effect(
    stderr: float, typical: float, clusters: int, degrees: float, alpha: float, power: float, sides: int = 2
) -> float:
    """Smallest mean difference (metric's units) that the test over `clusters` clusters finds with `power`.

    (t_alpha + t_power) * stderr with so many `degrees` of freedom: Miller 2024 (arXiv:2411.00640), power analysis,
    with t for its z. The error observed says little where few clusters differ, so the effect is at least that of
    differences of the `typical` size (units of the mean; > 0) in just as many clusters as can be significant:
    `typical` times `binary_effect` without discordance. inf: no difference can be significant with so few clusters.
    """
    least = binary_effect(clusters, 0.0, alpha, power, sides)
    if math.isinf(least):
        return math.inf
    quantiles = float(scipy.stats.t.isf(alpha / sides, degrees) + scipy.stats.t.isf(1 - power, degrees))
    return max(quantiles * stderr, typical * least)


def check_levels(confidence: float, alpha: float, power: float) -> None:
    """Raises `ValueError` for a level outside (0, 1) and for a power that is not above alpha."""
    for name, value in (("confidence", confidence), ("alpha", alpha), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name}={value} is not between 0 and 1")
    if power <= alpha:
        raise ValueError(f"power={power} is not above alpha={alpha}: blind guessing detects that much")
