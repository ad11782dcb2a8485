"""The sensitivity of a comparison: the power of McNemar's test, the minimum detectable effect, which is never 0, and
the least loss that a one-sided test could have shown, given what the baseline has to lose.

`sides` is 2 for a difference in either direction and 1 for a loss alone. The spread of the pairs alone would promise
more than there is to lose. A baseline with 2 right answers of 200 can lose those two and no more (p = 1/4): where
scores are shares, a loss is bounded, and the bound may lie below what a test can show.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from evalengine.report.stats.intervals import Floats
from evalengine.report.stats.loss_bound import LossBound, typical_part
from evalengine.report.stats.significance import TAIL_FACTOR, least_p, resamples

ROUNDS = 4  # of an iteration that converges at once
TAIL = 1e-12  # probability that sums over a binomial distribution leave out on each side


def mcnemar_power(count: int, discordance: float, difference: float, alpha: float, sides: int = 2) -> float:
    """Probability that exact McNemar on `count` pairs has p <= alpha and the right sign.

    Unconditional and exact, summed over the number m of discordant pairs (Duffy 1984, "Asymptotic and Exact Power for
    the McNemar Test", Biometrics 40(4)): m ~ Binomial(count, discordance), and losses ~ Binomial(m, (discordance +
    difference) / (2 discordance)). `discordance` is the probability that a pair differs, `difference` that of a loss
    minus that of a win, 0 < difference <= discordance <= 1. `alpha` is halved for two sides.
    """
    binom = scipy.stats.binom  # never frozen, which takes most of the time
    m = np.arange(int(binom.ppf(TAIL, count, discordance)), int(binom.isf(TAIL, count, discordance)) + 1)
    most_accepted = binom.isf(alpha / sides, m, 0.5)  # losses above this many are significant
    lost = min(1.0, (discordance + difference) / (2 * discordance))
    return float(np.sum(binom.pmf(m, count, discordance) * binom.sf(most_accepted, m, lost)))


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
    parts: Floats, bound: LossBound, scale: float, typical: float, alpha: float, power: float, sides: int = 2
) -> float:
    """Smallest mean difference (metric's units) that `paired.tested` finds with `power`, given the clusters' `parts`
    [G] of the mean (of the loss, for one side), their `bound` and the size of one score, `scale` (0: not known).

    critical + t_power * stderr as in Miller 2024 (arXiv:2411.00640), power analysis, with `critical_mean` for its
    z_alpha * stderr. The error observed says little where few clusters differ, so the effect is at least that of as few
    equal differences as can be significant: of the mean size of the parts, or of `typical` (> 0) over G where no part
    differs. They come with `power` if a share beta(k, G - k + 1)'s quantile of the clusters changes, all in one
    direction. If G of them are too few, the effect is at least the critical mean of a shift that all clusters share.
    inf: no difference can be significant with so few clusters.
    """
    groups, level = len(parts), alpha / sides
    if groups < 2 or least_p(groups) > level:
        return math.inf
    sizes = np.abs(parts[parts != 0])
    size = math.fsum(sizes) / len(sizes) if len(sizes) else typical / groups
    least = replace(bound, stderr=0.0, seen=max(bound.seen, size))

    def significant(count: int) -> bool:
        spread = size * math.sqrt(count * (groups - count) / (groups - 1))  # CR2 of so many equal parts
        still = bound.unit * (1 - count / groups) if scale else bound.unit  # a whole score where nothing changes
        own = replace(least, stderr=spread, seen=max(size, min(bound.seen, still)))
        critical = critical_mean(own, scale, alpha, sides)
        return least_p(count) <= level and count * size >= critical

    floor = critical_mean(least, scale, alpha, sides)
    if significant(groups):
        fewest = bisect_left(range(1, groups), True, key=significant) + 1
        floor = groups * size * float(scipy.special.betaincinv(fewest, groups - fewest + 1, power))
    flips, beyond = critical_flips(bound, level), float(scipy.special.stdtrit(bound.degrees, power)) * bound.stderr
    effect, centred = 0.0, parts - math.fsum(parts) / groups
    for _ in range(ROUNDS):  # a shift by the effect makes the parts, and so `seen`, larger
        seen = max(bound.seen, *(typical_part(centred + sign * effect / groups) for sign in (1, -1)[:sides]))
        effect = max(critical_mean(replace(bound, seen=seen), scale, alpha, sides), flips) + beyond
        if math.isinf(effect):
            break
    effect = max(effect, floor)
    return effect if effect <= bound.most else math.inf


def critical_mean(bound: LossBound, scale: float, alpha: float, sides: int) -> float:
    """The mean that has p = `alpha` by `LossBound.p_above` (one side) or `p_outside` (two), if its `stderr` and `seen`
    are those of `bound`; inf where none has."""
    own = replace(bound, loss=0.0, alpha=min(alpha, 0.5))
    least = math.inf if math.isnan(own.below) else -own.below
    if sides == 1 or not math.isfinite(least):
        return least
    # half(m)^2 = half(0)^2 + unseen^2 ((1 + m / scale)^2 - 1), in which `half` is m: a quadratic equation.
    half, unseen = (one.half(scale, own.alpha / 2) for one in (own, replace(own, stderr=0.0)))
    slope = unseen / scale if scale else 0.0
    if slope >= 1:
        return math.inf
    middle = unseen * slope
    return max(least, (middle + math.sqrt(middle**2 + (1 - slope**2) * half**2)) / (1 - slope**2))


def critical_flips(bound: LossBound, level: float) -> float:
    """The mean that has a one-sided p of `level` in the sign-flip test, if its standard error is that of `bound`."""
    critical = -float(scipy.special.stdtrit(bound.degrees, level))
    drawn = 1 / (1 + resamples(bound.groups))
    if level < 2 * drawn:  # By `tail_bound` alone, whose z is t / sqrt(1 + t^2 / clusters).
        z = -float(scipy.special.ndtri(min(level, drawn) / TAIL_FACTOR))
        critical = z / math.sqrt(1 - z * z / (bound.degrees + 1)) if z * z < bound.degrees + 1 else math.inf
    return critical * bound.stderr


def check_levels(confidence: float, alpha: float, power: float) -> None:
    """Raises `ValueError` for a level outside (0, 1) and for a power that is not above alpha."""
    for name, value in (("confidence", confidence), ("alpha", alpha), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name}={value} is not between 0 and 1")
    if power <= alpha:
        raise ValueError(f"power={power} is not above alpha={alpha}: blind guessing detects that much")


@dataclass(frozen=True)
class Detectable:
    """The least loss that a test can show."""

    loss: float  # metric's units; > 0, inf: none
    why: str = ""  # why no loss can be shown


def detectable_loss(
    a: Floats, b: Floats, codes: NDArray[np.intp], of_pairs: float | None, p_of_loss: Callable[[Floats], float],
    higher_is_better: bool, alpha: float, power: float, metrics: int = 1,
) -> Detectable:  # fmt: skip
    """The least loss that a test of baseline `a` [n] and run `b` [n] could have shown with probability `power`.

    of_pairs: what the spread of the differences alone would allow it to show (`mean_effect`); None for 0/1
    scores of unrelated documents, whose test is McNemar's. p_of_loss: the p of losses [n] by their bound.

    `alpha` is shared among `metrics`, as Holm's first and hardest step does. No loss has a lower p than that of
    everything the baseline has, without a win: if that p is above alpha, none can be shown. If not, that loss is found
    with probability 1, so the least detectable one is at most as large, whatever an approximation says so near the
    border. Scores outside [0, 1] have no bound that is known here: every document may lose any amount. `codes` [n] are
    the documents' clusters: related documents are one coin.
    """
    level, binary = alpha / max(metrics, 1), of_pairs is None
    shares = min(a.min(), b.min()) >= 0 and max(a.max(), b.max()) <= 1
    room = (a if higher_is_better else 1 - a) if shares else np.full(len(a), math.inf)
    losing = len(np.unique(codes[room > 0]))
    p = 0.5**losing if binary else least_p(losing)
    if losing and shares and not binary:
        p = max(p, p_of_loss(room))
    if p > level:
        return Detectable(math.inf, _why(losing, binary and higher_is_better, p, alpha, metrics))
    if of_pairs is None:
        return Detectable(binary_loss(len(a), losing, float(np.mean(a != b)), level, power))
    loss = min(of_pairs, float(np.mean(room)))
    return Detectable(loss, "" if math.isfinite(loss) else blind(int(codes.max()) + 1))


def blind(groups: int) -> str:
    """Why so many documents, or clusters of them, can show no mean difference."""
    if groups < 2:
        return "one document, or one cluster, has no spread"
    return f"the smallest p of {groups} documents or clusters is above alpha"


def binary_loss(count: int, right: int, discordance: float, alpha: float, power: float) -> float:
    """Smallest loss of a share, in (0, right / count], that one-sided exact McNemar finds with probability `power`.

    `binary_effect` with the baseline's answers as they are, `right` of `count`, instead of drawn anew: a loss is
    one of these, a win one of the rest. At the observed `discordance`, where that leaves room: raised to the loss
    where the loss needs more pairs, and lowered where losses or wins would be more than there are answers to change.
    2^-right must be at most `alpha`, so that the loss of all of them is found.
    """
    share = right / count

    def missing(loss: float) -> float:
        win = max(0.0, min((discordance - loss) / 2, 1 - share, share - loss))
        return loss_power(count, right, win + loss, win, alpha) - power

    return float(scipy.optimize.brentq(missing, min(1e-9, 0.01 / count), share, xtol=1e-12, rtol=1e-9))


def loss_power(count: int, right: int, loss: float, win: float, alpha: float) -> float:
    """Probability that one-sided exact McNemar has p <= alpha, if each right answer is lost with probability
    loss * count / right and each of the others won with win * count / (count - right).

    Exact, summed over the wins w. Losses l are significant if w + l fair coins show at most w wins with probability
    alpha or less; that is the probability of l or more losses before win w + 1, negative binomial in l.
    """
    lost, won = min(1.0, loss * count / right), min(1.0, win * count / max(1, count - right))
    binom, others = scipy.stats.binom, count - right  # never frozen, which takes most of the time
    wins = np.arange(int(binom.ppf(TAIL, others, won)), int(binom.isf(TAIL, others, won)) + 1)
    most_accepted = scipy.stats.nbinom.isf(alpha, wins + 1, 0.5)  # losses above this many are significant
    return float(np.sum(binom.pmf(wins, others, won) * binom.sf(most_accepted, right, lost)))


def _why(losing: int, answers: bool, p: float, alpha: float, metrics: int) -> str:
    singular, plural = (
        ("right answer", "right answers") if answers else ("score that can get worse", "scores that can get worse")
    )
    if losing == 0:
        return f"the baseline has no {singular}"
    few = f"1 {singular}" if losing == 1 else f"{losing} {plural}"
    shared = f" / {metrics} metrics" if metrics > 1 else ""
    return (
        f"the baseline has only {few}, and a run that lost {'it' if losing == 1 else 'them all'} would have "
        f"p {p:.3g}, above alpha {alpha:g}{shared}"
    )
