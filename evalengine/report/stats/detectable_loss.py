"""The least loss that a one-sided test could have shown, given what the baseline has to lose.

The spread of the pairs alone (`power.binary_effect`, `power.mean_effect` on one side) would promise more than there is
to lose. A baseline with 2 right answers of 200 can lose those two and no more (p = 1/4): where scores are shares, a
loss is bounded, and the bound may lie below what a test can show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from evalengine.report.stats.intervals import Floats
from evalengine.report.stats.permutation import EXACT, resamples
from evalengine.report.stats.power import TAIL


@dataclass(frozen=True)
class Detectable:
    """The least loss that a test can show."""

    loss: float  # metric's units; > 0, inf: none
    why: str = ""  # why no loss can be shown


def detectable_loss(
    a: Floats, b: Floats, codes: NDArray[np.intp], of_pairs: float | None, higher_is_better: bool, alpha: float,
    power: float, metrics: int = 1,
) -> Detectable:  # fmt: skip
    """The least loss that a test of baseline `a` [n] and run `b` [n] could have shown with probability `power`.

    of_pairs: what the spread of the differences alone would allow it to show (`power.mean_effect`); None for 0/1
    scores of unrelated documents, whose test is McNemar's.

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
    least_p = _p_of_losses_alone(losing, binary)
    if least_p > level:
        return Detectable(math.inf, _why(losing, binary and higher_is_better, least_p, alpha, metrics))
    if of_pairs is None:
        return Detectable(binary_loss(len(a), losing, float(np.mean(a != b)), level, power))
    everything = float(np.mean(room))
    loss = of_pairs if of_pairs <= everything else everything  # so that a NaN, of one document, gives everything
    return Detectable(loss, "" if math.isfinite(loss) else "one document has no spread")


def binary_loss(count: int, right: int, discordance: float, alpha: float, power: float) -> float:
    """Smallest loss of a share, in (0, right / count], that one-sided exact McNemar finds with probability `power`.

    `power.binary_effect` with the baseline's answers as they are, `right` of `count`, instead of drawn anew: a loss is
    one of these, a win one of the rest. At the observed `discordance`, as far as that leaves room: raised to the loss
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
    lost = scipy.stats.binom(right, min(1.0, loss * count / right))
    won = scipy.stats.binom(count - right, min(1.0, win * count / max(1, count - right)))
    wins = np.arange(int(won.ppf(TAIL)), int(won.isf(TAIL)) + 1)
    most_accepted = scipy.stats.nbinom.isf(alpha, wins + 1, 0.5)  # losses above this many are significant
    return float(np.sum(won.pmf(wins) * lost.sf(most_accepted)))


def _p_of_losses_alone(losing: int, binary: bool) -> float:
    """One-sided p if `losing` documents get worse and none better; its expectation where flips are drawn."""
    exact = 0.5**losing
    if binary or losing <= EXACT:
        return exact
    drawn = resamples(losing)
    return (1 + drawn * exact) / (1 + drawn)


def _why(losing: int, answers: bool, least_p: float, alpha: float, metrics: int) -> str:
    singular, plural = (
        ("right answer", "right answers") if answers else ("score that can get worse", "scores that can get worse")
    )
    if losing == 0:
        return f"the baseline has no {singular}"
    few = f"1 {singular}" if losing == 1 else f"{losing} {plural}"
    shared = f" / {metrics} metrics" if metrics > 1 else ""
    return (
        f"the baseline has only {few}, and a run that lost {'it' if losing == 1 else 'them all'} would have "
        f"p {least_p:.3g}, above alpha {alpha:g}{shared}"
    )
