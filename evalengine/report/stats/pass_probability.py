"""The probability that a gate's bound (`loss_bound`) lies within a margin if nothing is lost, and the number of
documents that makes it likely.

Scores of unrelated documents that change by one amount are counted exactly: changes are binomial, and half of them are
losses. All else is simulated with a fixed seed: clusters, means over tasks, differences of many sizes. Where many
clusters change, only their sizes are drawn: the loss is as good as normal, with the sum of their squares as variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from evalengine.report.stats.intervals import Floats, cluster_degrees
from evalengine.report.stats.loss_bound import LossBound, Stratum, loss_bound

MANY = 100  # changed clusters of unequal sizes whose signs make a loss that is as good as normal, given their sizes
MANY_EQUAL = 500  # the same of equal sizes, whose sums have steps
DRAWS = 2000  # simulated runs, where fewer change: a probability of 0.8 has a standard error of 0.009
FEW_DRAWS = 100  # of sizes alone
LEAST_DRAWS = 400
CELLS = 20_000_000  # clusters drawn in all: a simulation of more makes fewer draws
AT_ONCE = 2_000_000  # clusters held at once
FIRST = 64  # documents that are tried first
MOST_DOCUMENTS = 10_000_000
MOST_CLUSTERS = 100_000  # of a simulation
PRECISION = 0.01  # of a number of documents that is simulated
NORMAL = 1000  # quantiles that stand for a normal distribution
ROUNDING = 1e-12  # tolerance of a bound
TAIL = 6  # standard deviations of the number of changes; what lies beyond is not counted


@dataclass(frozen=True)
class Design:
    """A gate's documents, as they would be drawn again: fixed strata of random clusters.

    flips: the share of documents that change by a whole `scale`, independently of each other. None: a cluster changes
    as one of `strata`, drawn at random, by its part with either sign.
    """

    strata: tuple[Stratum, ...]
    scale: float  # the size of one score
    alpha: float  # the error of the bound, at most 0.5
    most: float = math.inf  # the most that can be lost
    flips: float | None = None
    pairs: int = 1  # the pairs of runs that `strata` pools

    @classmethod
    def of_variance(cls, variance: float, alpha: float) -> Design:
        """Unrelated documents, whose differences are normal with this variance and scores in [0, 1]."""
        normal = scipy.special.ndtri((np.arange(NORMAL) + 0.5) / NORMAL)
        parts = normal * math.sqrt(variance / float(np.mean(normal**2))) / NORMAL
        return cls((Stratum(parts, parts, np.full(NORMAL, 1 / NORMAL), np.ones(NORMAL)),), 1.0, alpha, 1.0)

    @property
    def documents(self) -> int:
        return round(sum(float(layer.sizes.sum()) for layer in self.strata)) // self.pairs

    @property
    def clusters(self) -> int:
        return sum(len(layer.parts) for layer in self.strata) // self.pairs

    @property
    def bound(self) -> LossBound:
        """The bound of the loss that `strata` show."""
        return loss_bound(self.strata, self.scale, self.alpha, self.most)

    def passes(self, margin: float, documents: int | None = None, allowed: float = math.inf) -> float:
        """The probability that the bound lies within `margin`, and the loss that is seen within `allowed` (both in the
        metric's units), over so many documents; None: over its own."""
        times = 1.0 if documents is None else documents / self.documents
        counts = [round(times * len(layer.parts) / self.pairs) for layer in self.strata]
        if margin >= self.most or min(counts) < 2:
            return float(margin >= self.most)
        (alike, *more), rng = [self._alike(layer) for layer in self.strata], np.random.default_rng(0)
        if alike is not None and not more:
            return _counted(counts[0], alike, lambda draw: self._least_room([draw], margin, allowed) >= 0)
        equal = self.flips is not None or any(map(self._alike, self.strata))
        smooth = times * self._changed >= (MANY_EQUAL if equal else MANY)
        draws = FEW_DRAWS if smooth else max(LEAST_DRAWS, min(DRAWS, CELLS // sum(counts)))
        batch, passed = max(1, AT_ONCE // max(counts)), 0.0
        for first in range(0, draws, batch):
            own = [self._drawn(layer, count, min(batch, draws - first), rng)
                   for layer, count in zip(self.strata, counts, strict=True)]  # fmt: skip
            room = self._least_room(own, margin, allowed)
            if smooth:
                room = room + sum(draw.loss for draw in own)  # of the loss alone
                passed += float(scipy.special.ndtr(room / np.sqrt(sum(draw.squares for draw in own))).sum())
            else:
                passed += int(np.count_nonzero(room >= 0))
        return passed / draws

    def needed(self, margin: float, power: float, allowed: float = math.inf) -> int | None:
        """The fewest documents with which `passes` is `power` or more; None if no reasonable number is enough."""
        counted = len(self.strata) == 1 and self._alike(self.strata[0]) is not None
        largest = MOST_DOCUMENTS if counted else MOST_CLUSTERS * self.documents // self.clusters
        low, high = 0, FIRST if counted else self.documents
        while self.passes(margin, high, allowed) < power:
            low, high = high, 2 * high
            if high > largest:
                return None
        while high - low > max(1, 0 if counted else PRECISION * high):
            middle = (low + high) // 2
            low, high = (low, middle) if self.passes(margin, middle, allowed) >= power else (middle, high)
        return high

    @property
    def _changed(self) -> float:
        """As many clusters of equal size as those that change: (sum x^2)^2 / sum x^4."""
        if self.flips is not None:
            return sum(float(np.sum(1 - (1 - self.flips) ** layer.sizes)) for layer in self.strata) / self.pairs
        squares = np.concatenate([layer.parts for layer in self.strata]) ** 2
        return float(squares.sum()) ** 2 / float((squares**2).sum()) / self.pairs if squares.any() else 0.0

    def _least_room(self, drawn: Sequence[_Sums], margin: float, allowed: float) -> Floats:
        """How far each draw's bound lies below `margin`, and its loss below `allowed`: the lesser of the two."""
        bound, loss = self._bounds(drawn)
        return np.minimum(margin - bound, allowed - loss) + ROUNDING

    def _alike(self, layer: Stratum) -> _Alike | None:
        """The one size of the changes of a stratum of unrelated documents; None if there are several, or clusters."""
        if layer.sizes.max() > 1 or np.ptp(layer.shares) > 1e-9 * layer.shares[0]:
            return None
        weight = float(layer.shares.sum()) / self.pairs
        if self.flips is not None:
            return _Alike(weight, self.scale, self.flips)
        sizes = np.abs(layer.parts[layer.parts != 0])
        if len(sizes) and np.ptp(sizes) > 1e-9 * sizes[0]:
            return None
        size = float(sizes[0] / layer.shares[0]) if len(sizes) else self.scale
        return _Alike(weight, size, len(sizes) / len(layer.parts))

    def _drawn(self, layer: Stratum, count: int, draws: int, rng: np.random.Generator) -> _Sums:
        """So many clusters of a stratum, as often as `draws` says."""
        alike = self._alike(layer)
        if alike is not None:
            changed = rng.binomial(count, alike.flips, draws)
            return alike.sums(count, changed, rng.binomial(changed, 0.5))
        weight = float(layer.shares.sum()) / self.pairs
        evenly = np.arange(count) * len(layer.parts) // count  # as many of each size as there are
        degrees = cluster_degrees(layer.shares[evenly])
        if self.flips is None:
            chosen = rng.integers(2 * len(layer.parts), size=(draws, count))  # a cluster, and a sign
            parts, shares = np.append(layer.parts, -layer.parts)[chosen], np.append(layer.shares, layer.shares)[chosen]
            times = weight / shares.sum(1, keepdims=True)
            return _sums(parts * times, shares * times, degrees)
        shares, sizes = layer.shares[evenly], layer.sizes[evenly].astype(np.intp)
        shares = shares * weight / shares.sum()
        of_documents = np.repeat(np.arange(count), sizes)
        changes = _changes(draws * len(of_documents), self.flips, rng)
        cells = changes // len(of_documents) * count + of_documents[changes % len(of_documents)]
        net = np.bincount(cells, 1.0 - 2 * rng.integers(2, size=len(cells)), draws * count).reshape(draws, count)
        return _sums(net * (self.scale * shares / sizes), shares[None], degrees)

    def _bounds(self, drawn: Sequence[_Sums]) -> tuple[Floats, Floats]:
        """(the bound of each draw, its loss), as `loss_bound.loss_bound`."""
        loss, variance, squares, cubes, everything = (
            np.asarray(sum(column)) for column in zip(*((own.loss, own.variance, own.squares, own.cubes, own.everything)
                                                        for own in drawn), strict=True))  # fmt: skip
        weight = math.fsum(own.weight for own in drawn)
        sized = np.divide(cubes, squares, out=np.zeros_like(cubes), where=squares > 0)
        unit = np.maximum(self.scale * everything / weight, sized)
        degrees: Floats | float = drawn[0].degrees
        if len(drawn) > 1:
            counted = [own.variance + (self.scale * own.everything / own.weight) ** 2 for own in drawn]
            spread = np.asarray(sum(v**2 / own.degrees for v, own in zip(counted, drawn, strict=True)))
            most = np.full_like(spread, math.fsum(own.degrees for own in drawn))
            degrees = np.divide(np.asarray(sum(counted)) ** 2, spread, out=most, where=spread > 0)
        quantile = -scipy.special.stdtrit(degrees, self.alpha)
        shift = LossBound(0, 0, 0, 0, 0, self.alpha, 0).shift
        bound = loss + shift * unit + quantile * np.sqrt(variance + unit**2)
        largest = np.max(np.broadcast_arrays(*(own.largest for own in drawn)), axis=0)
        exact = -self.most * np.expm1(largest * math.log(self.alpha))
        lossless = np.logical_and.reduce([own.lossless for own in drawn])
        return np.where(lossless, np.minimum(bound, exact), bound), loss


class _Sums(NamedTuple):
    """A stratum's sums over its clusters' parts x, one for each draw [D]."""

    loss: Floats  # sum x
    variance: Floats  # CR2
    squares: Floats  # sum x^2
    cubes: Floats  # sum |x|^3
    everything: Floats | float  # sum of squared shares
    lossless: NDArray[np.bool_]  # whether no x is a loss
    largest: Floats | float  # share, of the largest cluster
    weight: float  # sum of shares
    degrees: float


class _Alike(NamedTuple):
    """Unrelated documents of equal weight, of which a share `flips` changes by `size`."""

    weight: float
    size: float
    flips: float

    def sums(self, count: int, changed: NDArray[np.intp], worse: NDArray[np.intp]) -> _Sums:
        """Of `count` documents `changed` [D] change, and `worse` [D] of those are losses."""
        unit, total = self.weight * self.size / count, np.asarray(changed, dtype=np.float64)
        net = 2 * worse - total
        variance = unit**2 * (total - net**2 / count) / (1 - 1 / count)
        everything = self.weight**2 / count
        return _Sums(unit * net, variance, unit**2 * total, unit**3 * total, everything,
                     np.asarray(worse == 0, dtype=np.bool_), self.weight / count, self.weight, count - 1.0)  # fmt: skip


def _sums(parts: Floats, shares: Floats, degrees: float) -> _Sums:
    """Of clusters' parts [D, G] with their shares [D or 1, G]."""
    loss, weight = parts.sum(1), float(shares[0].sum())
    own = shares / weight
    squares = parts**2
    variance = ((parts - own * loss[:, None]) ** 2 / (1 - own)).sum(1)
    return _Sums(loss, variance, squares.sum(1), (squares * np.abs(parts)).sum(1), (shares**2).sum(1),
                 parts.max(1) <= 0, shares.max(1), weight, degrees)  # fmt: skip


def _counted(count: int, alike: _Alike, passes: Callable[[_Sums], NDArray[np.bool_]]) -> float:
    """The probability that `passes` holds, over all numbers of changes and of losses among them. For each number of
    changes it must hold up to some number of losses, which a bisection finds."""
    middle, deviation = count * alike.flips, math.sqrt(count * alike.flips * (1 - alike.flips))
    least, most = max(0, math.floor(middle - TAIL * deviation)), min(count, math.ceil(middle + TAIL * deviation + TAIL))
    changed = np.arange(least, most + 1)
    low, high = np.full(len(changed), -1), changed.copy()
    while (low < high).any():
        worse = np.maximum(0, (low + high + 1) // 2)
        good = passes(alike.sums(count, changed, worse))
        low, high = np.where(good, worse, low), np.where(good, high, worse - 1)
    below = scipy.special.bdtr(changed, count, alike.flips)
    chance = np.diff(below, prepend=scipy.special.bdtr(least - 1, count, alike.flips) if least else 0.0)
    return float(np.sum(chance * np.where(low < 0, 0.0, scipy.special.bdtr(np.maximum(low, 0), changed, 0.5))))


def _changes(trials: int, rate: float, rng: np.random.Generator) -> NDArray[np.intp]:
    """Which of so many independent trials of one rate succeed, in order, by the gaps between them."""
    if rate == 0:
        return np.zeros(0, dtype=np.intp)
    expected = trials * rate
    places = np.cumsum(rng.geometric(rate, math.ceil(expected + 8 * math.sqrt(expected) + 32))) - 1
    return np.asarray(places[places < trials])
