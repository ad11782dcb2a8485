"""How large a loss may be, for all that pairs of documents show: the one-sided bound of the non-inferiority rule, the
two-sided interval of `compare` that agrees with it, and the bound that may be looked at after every document, by which
a gate in steps ends where it is decided.

The bound needs no assumption about how many answers flip, nor about their direction: unseen flips are bounded, too.
Losses are in the metric's units and positive if the run is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from evalengine.report.stats.intervals import (
    Floats,
    cluster_degrees,
    cluster_sums,
    few_clusters,
    heavy_tails,
    residual_variance,
)

ROUNDING = 1e-12  # of the largest part: residuals no larger are rounding
# A bound that allows for no larger changes than were seen has a caution if, with any change allowed, it would be this
# many times as far from the mean. In 27 of 60 simulated settings (30 to 1,000 documents gain, jitter by .02 to .3, and
# are rarely lost whole) the end towards 0 was wrong in .06 to .37 of 400 draws, and without a caution in .055 at most.
FURTHER = 1.5


@dataclass(frozen=True)
class Stratum:
    """A task's clusters, as parts of one mean: `parts` sum to its share of the mean loss."""

    parts: Floats  # [G] each cluster's part of the mean loss
    residuals: Floats  # [G] each part less the stratum's own mean
    shares: Floats  # [G] each cluster's share of all weight
    sizes: Floats  # [G] each cluster's documents


@dataclass(frozen=True)
class LossBound:
    """The mean loss is at most `bound`, with confidence 1 - alpha: the loss that was seen, a shift for skewness and for
    flips that were not seen, and the margin of error. `p_above` is the same bound from below, with `seen` for `unit`: a
    loss is shown by the sizes of changes that were seen, and excluded whatever their size."""

    loss: float  # the observed mean loss
    stderr: float  # CR2, of the observed mean; NaN for one cluster
    unit: float  # the part of the loss that one more cluster would make; NaN for one cluster
    seen: float  # the same if clusters that changed change by no more than they did: at most `unit`
    degrees: float  # of freedom, of the standard error; NaN for one cluster
    alpha: float  # the error that `bound` may have, at most 0.5
    groups: int  # how many clusters there are
    most: float = math.inf  # the most that can be lost: 1 for a share
    lossless: float = 0.0  # if no cluster lost anything, the largest cluster's share of all weight; else 0

    @property
    def shift(self) -> float:
        """The allowance for skewness and unseen flips, in units."""
        return (float(scipy.special.ndtri(self.alpha)) ** 2 + 2) / 3

    @property
    def quantile(self) -> float:
        """The margin of error, in standard errors."""
        return -float(scipy.special.stdtrit(self.degrees, self.alpha))

    @property
    def error(self) -> float:
        """The margin of error; inf for one cluster, which says nothing about others."""
        error = self.quantile * math.hypot(self.stderr, self.unit)
        return math.inf if math.isnan(error) else error

    @property
    def bound(self) -> float:
        bound = self.loss + self.shift * self.unit + self.error
        if self.lossless:
            bound = min(bound, -self.most * math.expm1(self.lossless * math.log(self.alpha)))
        return self.most if math.isnan(bound) else min(self.most, bound)

    def p_above(self, margin: float) -> float:
        """How likely a loss of `margin` or less shows so large a loss: the least alpha at which the bound from below
        (`below`) lies above `margin`; 1 where none does."""
        return self._least_alpha(lambda bound: bound.below - margin)

    def p_outside(self, scale: float) -> float:
        """The least alpha at which `difference_interval` of these parts and this `scale`, at confidence 1 - alpha,
        excludes 0; 1 where none up to 0.5 does."""
        return self._least_alpha(lambda bound: bound.inner(scale))

    def inner(self, scale: float) -> float:
        """The end towards 0 of `difference_interval` at confidence 1 - alpha, of the loss's size: 0 is excluded where
        it is positive."""
        size = abs(self.loss)
        return min(replace(self, loss=size).below, size - self.half(scale, self.alpha / 2))

    def half(self, scale: float, tail: float) -> float:
        """Half of an interval around the loss, with `seen` as the unit and an error of `tail` on each side."""
        unseen = 2**0.5 * self.seen * (1 + abs(self.loss) / (scale or math.inf)) * float(scipy.special.ndtri(tail))
        return math.hypot(float(scipy.special.stdtrit(self.degrees, tail)) * self.stderr, unseen)

    def p_beyond(self, margin: float) -> float:
        """P(loss > margin), with the bounds of all levels taken as the loss's distribution: a confidence distribution
        (Xie & Singh 2013, "Confidence Distribution, the Frequentist Distribution Estimator of a Parameter: A Review",
        International Statistical Review 81(1)), which for normal differences is the posterior under a flat prior.

        At most alpha exactly where the bound is within the margin; 0.5 where the margin is in the shift between the
        two bounds; NaN for one cluster. If the loss is the margin, it is at most p in at most a share p of cases.
        """
        if math.isinf(self.error):
            return math.nan
        within = self._least_alpha(lambda bound: margin - bound.bound)
        return within if within < 1 else max(0.5, 1 - self.p_above(margin))

    def _least_alpha(self, beyond: Callable[[LossBound], float]) -> float:
        """The least alpha whose bound is at least what `beyond` requires, between 1e-12 and 0.5; 1 where none is."""
        least, most = 1e-12, 0.5
        if not beyond(replace(self, alpha=most)) > 0:
            return 1.0
        if beyond(replace(self, alpha=least)) > 0:
            return least
        return float(scipy.optimize.brentq(lambda p: beyond(replace(self, alpha=p)), least, most, xtol=1e-13))

    @property
    def below(self) -> float:
        """The mean loss is at least loss - shift seen - q sqrt(V + seen^2), with confidence 1 - alpha; NaN for one
        cluster."""
        return self.loss - self.shift * self.seen - self.quantile * math.hypot(self.stderr, self.seen)


def stratum(losses: Floats, codes: NDArray[np.intp], weight: float = 1.0) -> Stratum:
    """A task's stratum. losses [n]: its documents'; codes [n]: their clusters in 0..G-1; weight: the task's in the
    mean."""
    count = len(losses)
    sums, sizes = cluster_sums(losses, codes), np.bincount(codes).astype(np.float64)
    mean = math.fsum(losses) / count
    return Stratum(weight * sums / count, weight * (sums - sizes * mean) / count, weight * sizes / count, sizes)


class Losses(NamedTuple):
    """A task's documents as part of a mean over tasks."""

    losses: Floats  # [n]
    clusters: Sequence[Hashable]  # [n] names, which tasks share where they ask the same items: translations, say
    weight: float  # the task's in the mean


def joined(tasks: Sequence[Losses]) -> list[Stratum]:
    """The strata of a mean over fixed tasks: one for each task, and one for all that share clusters, in which a
    cluster's part is the sum of its parts of the tasks. Taken as independent, eleven translations among which 30 % of
    the flips are shared passed a margin falsely in 9 % of cases, and in 23 % at 60 %.

    A task of one cluster has no spread that could be seen: all tasks are then one stratum, in which differences between
    tasks count as spread."""
    if len(tasks) == 1:
        return [
            stratum(tasks[0].losses, np.unique(np.asarray(tasks[0].clusters), return_inverse=True)[1], tasks[0].weight)
        ]
    layers: list[dict[str, Floats]] = []  # cluster -> (part, residual, share, documents)
    for task in tasks:
        names, codes = np.unique(np.asarray(task.clusters), return_inverse=True)
        own = stratum(task.losses, codes, task.weight)
        layer = dict(zip(names.tolist(), np.stack((own.parts, own.residuals, own.shares, own.sizes), 1), strict=True))
        apart = []
        for other in layers:
            if other.keys().isdisjoint(layer):
                apart.append(other)
                continue
            layer = {name: layer.get(name, 0.0) + other.get(name, 0.0) for name in {**other, **layer}}
        layers = [*apart, layer]
    columns = [np.stack(list(layer.values()), 1) for layer in layers]
    if all(len(layer) > 1 for layer in layers):
        return [Stratum(*column) for column in columns]
    parts, _, shares, sizes = np.concatenate(columns, 1)
    return [Stratum(parts, parts - shares * (math.fsum(parts) / math.fsum(shares)), shares, sizes)]


def opposite(strata: Sequence[Stratum]) -> list[Stratum]:
    """The strata of gains instead of losses."""
    return [replace(layer, parts=-layer.parts, residuals=-layer.residuals) for layer in strata]


def loss_bound(strata: Sequence[Stratum], scale: float, alpha: float, most: float = math.inf) -> LossBound:
    """The one-sided upper bound of the mean loss at confidence 1 - `alpha`, no more than `most`; `scale` is the size of
    one score.

        loss + t (z^2 + 2) / 3 + q sqrt(V + t^2)

    V is the clusters' variance (`intervals.clustered_stderr`'s CR2, summed over strata whose tasks are fixed), q
    Student's quantile (`intervals.cluster_degrees`, by Satterthwaite 1946 over strata) and z the normal one. t = sum
    |x|^3 / sum x^2 over the clusters' parts x is the largest skewness (third moment over variance) that differences of
    these sizes can have: all of them losses. It is no less than if a cluster lost all of its `scale`: among scores in
    [0, 1] that jitter, a rare total loss that was not seen made up to 37 % of the passes false. It enters
    - as t (2 z^2 + 1) / 6, the Edgeworth correction of a studentised mean's bound (Johnson 1978, "Modified t Tests and
      Confidence Intervals for Asymmetrical Populations", Journal of the American Statistical Association 73(363); Hall
      1992, "On the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B 54(1)), plus
      t / 2 for continuity: together t (z^2 + 2) / 3;
    - as t^2 in the variance, one more flip than was seen (Agresti & Coull's and Bonett & Price's way), so that no flip
      among n is no certainty: the bound is then 3.2 t at 95 %, where the rule of three has 3.0 t.
    If no cluster lost anything, the bound is at most the exact one, most (1 - alpha^s), with s the largest cluster's
    share: 1 - alpha^(1 / n) for n documents (Hanley & Lippman-Hand 1983, JAMA 249(13): the rule of three). A loss of
    that size shows in no cluster with probability alpha at most, by the inequality of the weighted means, whatever
    part of a score is lost, whichever clusters lose it.
    Without these terms a bound of few flips is wrong far too often: Bonett and Price's one-sided bound in up to 9 % of
    comparisons instead of 5 % (200 documents, 2 points), a plain t in 11 % of those of 100 clusters.
    `benchmarks statistics` computes these errors.

    From below (`LossBound.below`, with which a loss is shown), t allows for a whole score only in clusters that did not
    change: of the others the sizes of changes are known (`LossBound.seen`). With the t of above, a loss of 11 points by
    28 of 30 documents of 64 samples each had a p of .06 (by sign flips 1e-5). Larger changes may be rare and unseen:
    `bound_cautions` says so where it matters.
    """
    groups = sum(len(layer.parts) for layer in strata)
    parts = np.concatenate([layer.parts for layer in strata])
    loss = math.fsum(parts)
    if any(len(layer.parts) < 2 for layer in strata):
        return LossBound(loss, math.nan, math.nan, math.nan, math.nan, alpha, groups, most)
    variances = [residual_variance(layer.residuals, layer.shares) for layer in strata]
    variance = math.fsum(variances)
    shares = np.concatenate([layer.shares for layer in strata])
    lossless = 0.0 if np.any(parts > 0) else float(shares.max())
    degrees, typical = _freedom(strata, variances, scale), typical_part(parts)
    still = np.abs(parts) <= 1e-9 * scale * shares
    unit, seen = (max(_whole(own, shares, scale), typical) for own in (shares, shares[still]))
    return LossBound(loss, math.sqrt(variance), unit, seen, degrees, alpha, groups, most, lossless)


def difference_interval(
    strata: Sequence[Stratum], scale: float, most: float = math.inf, confidence: float = 0.95
) -> tuple[float, float]:
    """The two-sided interval of the mean difference whose parts are `strata`; `scale` and `most` as in `loss_bound`.
    (-inf, inf) for one cluster.

        mean -+ sqrt(q^2 V + 2 z^2 t^2 (1 + |mean| / scale)^2), and no narrower on either side than the gate's bound

    If the end towards 0 excludes 0 with t for the sizes of changes that were seen (`LossBound.seen`), it is that end:
    0 is outside exactly where `LossBound.p_outside` is at most 1 - confidence.

    q is Student's quantile at (1 - confidence) / 2 and z the normal one; V and t are `loss_bound`'s. The term in t is
    two more changes, one in each direction, as in Bonett & Price 2012 ("Adjusted Wald Confidence Interval for a
    Difference of Binomial Proportions Based on Paired Data", Journal of Educational and Behavioral Statistics 37(4)),
    each as far from the mean as a cluster can be. The gate's bounds, each at 1 - confidence, matter where few clusters
    change; if none does, they are the interval. So every loss that `compare` excludes at 95 % is one that the gate
    excludes at 5 %, unless it shows a gain: it then excludes all losses, and the gate those above its bound, which is
    at most 3.2 t. Of n documents without a change both say 1 - 0.05^(1 / n).

    Coverage in 142 simulated cases of shares (few documents or clusters lose all or a part, jitter, pass@1 of several
    samples, 8 to 1,319 documents) was .945 to 1 with the larger t on both sides. With the smaller one it fell
    to .63 among documents that jitter and gain a little, of which few are lost whole; all misses beyond .055 had a
    caution (`FURTHER`). Student's t covered .38 to 1, below .93 in 46 cases, at three quarters
    of the width (median); the gate's bounds at half the error .96 to 1, at 1.2 times the width; a bootstrap-t .37 to 1.
    Differences of log-likelihoods with tails were covered in .56 to .98; in .93 or more they were covered or had a
    caution (`intervals.heavy_tails`).
    """
    gain, loss = (loss_bound(side, scale, min(0.5, 1 - confidence), most) for side in (strata, opposite(strata)))
    if math.isnan(gain.degrees):
        return -math.inf, math.inf
    low, high = -loss.bound, gain.bound
    if any(layer.parts.any() for layer in strata):
        half = replace(gain, seen=gain.unit).half(scale, (1 - confidence) / 2)
        low, high = min(gain.loss - half, low), max(gain.loss + half, high)
        if (inner := gain.inner(scale)) > 0:
            low, high = (inner, high) if gain.loss > 0 else (low, -inner)
    return max(-most, low), min(most, high)


def bound_cautions(
    strata: Sequence[Stratum], scale: float, alpha: float = 0.05, either: bool = True
) -> tuple[str, ...]:
    """Why the bounds of these strata at `alpha` may be too narrow: few clusters, log-likelihoods (a `scale` of 0) whose
    tails so few may not show, or a difference that is shown only if no cluster can change by more than the clusters
    that changed. either: gains count as well as losses."""
    parts, residuals, shares, sizes = (
        np.concatenate([getattr(layer, name) for layer in strata]) for name in ("parts", "residuals", "shares", "sizes")
    )
    bound = loss_bound(strata, scale, alpha)
    said = [few_clusters(round(float(sizes.sum())), len(parts), bound.degrees + 1)]
    if not scale and len(parts) > 1 and np.abs(residuals).max() > ROUNDING * np.abs(parts).max():
        said.append(heavy_tails(residuals))
    shown = replace(bound, loss=abs(bound.loss) if either else bound.loss)
    if shown.below > 0 and shown.loss - replace(shown, seen=bound.unit).below > FURTHER * (shown.loss - shown.below):
        what, largest = "document" if sizes.max() == 1 else "cluster", float(np.max(np.abs(parts) / shares))
        unseen = f"a change larger than {largest:.2g} in fewer than 3 in {len(parts):,} {what}s"
        said.append(f"{unseen} would not have been seen")
    return tuple(filter(None, said))


def _freedom(strata: Sequence[Stratum], variances: Sequence[float], scale: float) -> float:
    """Satterthwaite's degrees of freedom over strata of so many each; their sum where nothing differs and no size of a
    change is known. A stratum counts with one unseen change of a cluster: three that did not change are still three."""
    degrees = [cluster_degrees(layer.shares) for layer in strata]
    unseen = [_whole(layer.shares, layer.shares, scale) ** 2 for layer in strata]
    variances = [seen + more for seen, more in zip(variances, unseen, strict=True)]
    if not any(variances):
        return math.fsum(degrees)
    return math.fsum(variances) ** 2 / math.fsum(v**2 / own for v, own in zip(variances, degrees, strict=True))


def _whole(own: Floats, shares: Floats, scale: float) -> float:
    """The part of the mean that a cluster makes if it changes by a whole score, on average over all `shares`, in which
    larger ones count for more; those that are not among `own` count as 0."""
    return scale * math.fsum(own**2) / math.fsum(shares)


def typical_part(parts: Floats) -> float:
    """sum |x|^3 / sum x^2: the size of the parts that are not 0, in which larger ones count for more; 0 if all are."""
    sizes = np.abs(parts[parts != 0])
    largest = float(sizes.max(initial=0.0))  # so that no power of a tiny size is 0
    return largest * math.fsum((sizes / largest) ** 3) / math.fsum((sizes / largest) ** 2) if len(sizes) else 0.0


LARGEST_BET = 0.99  # of the capital; all of it could be lost at one document
UNSEEN = 0.5  # squared loss of the one document that is thought of before the first: it makes the first bets small


@dataclass(frozen=True, eq=False, kw_only=True)
class SteppedBound(LossBound):
    """`LossBound` for documents that were evaluated in a random order until something was decided. `alpha` is that of
    all looks together; losses must be in [-1, 1].

    A bet against "the mean loss is at least the margin": the capital starts at 1 and is multiplied by 1 + bet * gain at
    each document, whose gain is margin - loss. If the claim holds, it is expected never to grow, whatever bets are
    chosen from the documents before, so that it ever reaches 1 / alpha with probability alpha at most (Ville 1939,
    "Etude critique de la notion de collectif"). Betting for bounded means: Waudby-Smith & Ramdas 2024, "Estimating
    means of bounded random variables by betting", Journal of the Royal Statistical Society B 86(1).

    Half of alpha is spent so at every document, and half on the bound of the whole set (`loss_bound`), if all are
    evaluated.
    """

    sums: Floats  # [G] each cluster's losses, in the order in which they were evaluated; empty: nothing can be bet on
    sizes: Floats  # [G] documents of each cluster
    largest: float  # documents of the largest cluster of the whole set, known before the first
    whole: LossBound | None  # the bound of the whole set at alpha / 2; None before all documents are evaluated

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
