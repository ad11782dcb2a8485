"""How large a loss may be, for all that pairs of documents show: the one-sided bound of the non-inferiority rule.

The bound needs no assumption about how many answers flip, nor about their direction: unseen flips are bounded, too.
Losses are in the metric's units and positive if the run is worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from evalengine.report.stats.intervals import Floats, cluster_sums


@dataclass(frozen=True)
class Stratum:
    """A task's clusters, as parts of one mean: `parts` sum to its share of the mean loss."""

    parts: Floats  # [G] each cluster's part of the mean loss
    residuals: Floats  # [G] each part less the stratum's own mean
    shares: Floats  # [G] each cluster's share of all weight


@dataclass(frozen=True)
class LossBound:
    """The mean loss is at most `bound`, with confidence 1 - alpha: the loss that was seen, a shift for skewness and for
    flips that were not seen, and the margin of error."""

    loss: float  # the observed mean loss
    stderr: float  # CR1, of the observed mean; NaN for one cluster
    unit: float  # the part of the loss that one more cluster would make
    shift: float  # what skewness and unseen flips add, in units; NaN for one cluster
    quantile: float  # the margin of error, in standard errors
    groups: int  # how many clusters there are
    most: float = math.inf  # the most that can be lost: 1 for a share

    @property
    def error(self) -> float:
        """The margin of error; inf for one cluster, which says nothing about others."""
        error = self.quantile * math.hypot(self.stderr, self.unit)
        return math.inf if math.isnan(error) else error

    @property
    def bound(self) -> float:
        bound = self.loss + self.shift * self.unit + self.error
        return self.most if math.isnan(bound) else min(self.most, bound)

    def times_the_documents(self, margin: float) -> float:
        """How many times as many documents would bring the bound to `margin`, if they showed the same; inf: none."""
        room, shift = margin - self.loss, self.shift * self.unit
        if not (room > 0 and math.isfinite(self.error)):
            return math.inf
        # loss + shift x + q sqrt(V x + unit^2 x^2) = margin, for x = 1 / times: a x^2 + b x = room^2
        a = (self.quantile * self.unit) ** 2 - shift**2
        b = (self.quantile * self.stderr) ** 2 + 2 * room * shift
        return (b + math.sqrt(b * b + 4 * a * room**2)) / (2 * room**2)


def stratum(losses: Floats, codes: NDArray[np.intp], weight: float = 1.0) -> Stratum:
    """A task's stratum. losses [n]: its documents'; codes [n]: their clusters in 0..G-1; weight: the task's in the
    mean."""
    count = len(losses)
    sums, sizes = cluster_sums(losses, codes), np.bincount(codes).astype(np.float64)
    mean = math.fsum(losses) / count
    return Stratum(weight * sums / count, weight * (sums - sizes * mean) / count, weight * sizes / count)


def loss_bound(strata: Sequence[Stratum], scale: float, alpha: float, most: float = math.inf) -> LossBound:
    """The one-sided upper bound of the mean loss at confidence 1 - `alpha`, no more than `most`; `scale` is the size of
    one score.

        loss + t (z^2 + 2) / 3 + q sqrt(V + t^2)

    V is the clusters' variance (`intervals.clustered_stderr`'s CR1, summed over strata whose tasks are fixed), q
    Student's quantile (Satterthwaite 1946's degrees of freedom over strata) and z the normal one. t = sum |x|^3 /
    sum x^2 over the clusters' parts x is the largest skewness (third moment over variance) that differences of these
    sizes can have: all of them losses. It enters
    - as t (2 z^2 + 1) / 6, the Edgeworth correction of a studentised mean's bound (Johnson 1978, "Modified t Tests and
      Confidence Intervals for Asymmetrical Populations", Journal of the American Statistical Association 73(363); Hall
      1992, "On the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B 54(1)), plus
      t / 2 for continuity: together t (z^2 + 2) / 3;
    - as t^2 in the variance, one more flip than was seen (Agresti & Coull's and Bonett & Price's way), so that no flip
      among n is no certainty: the bound is then 3.2 t at 95 %, where the rule of three has 3.0 t.
    Without these terms a bound of few flips is wrong far too often: Bonett and Price's one-sided bound in up to 9 % of
    comparisons instead of 5 % (200 documents, 2 points), a plain t in 11 % of those of 100 clusters. `bench
    statistics` computes these errors.
    """
    groups = sum(len(layer.parts) for layer in strata)
    parts = np.concatenate([layer.parts for layer in strata])
    loss = math.fsum(parts)
    if any(len(layer.parts) < 2 for layer in strata):
        return LossBound(loss, math.nan, math.nan, math.nan, math.nan, groups, most)
    variances = [_variance(layer) for layer in strata]
    variance = math.fsum(variances)
    unit = _unit(parts, np.concatenate([layer.shares for layer in strata]), scale)
    quantile = -float(scipy.special.stdtrit(_freedom(strata, variances), alpha))
    shift = (float(scipy.special.ndtri(alpha)) ** 2 + 2) / 3
    return LossBound(loss, math.sqrt(variance), unit, shift, quantile, groups, most)


def _variance(layer: Stratum) -> float:
    groups = len(layer.parts)
    return math.fsum(layer.residuals**2) * groups / (groups - 1)


def _freedom(strata: Sequence[Stratum], variances: Sequence[float]) -> float:
    """Satterthwaite's degrees of freedom; those of all clusters where nothing differs."""
    spread = math.fsum(v**2 / (len(layer.parts) - 1) for v, layer in zip(variances, strata, strict=True))
    if spread == 0:
        return float(sum(len(layer.parts) - 1 for layer in strata))
    return math.fsum(variances) ** 2 / spread


def _unit(parts: Floats, shares: Floats, scale: float) -> float:
    """The size of one cluster's part of the loss: a mean over clusters that differ, in which larger ones count for
    more; where none differs, over clusters that lose everything."""
    sizes = np.abs(parts[parts != 0])
    if len(sizes) == 0:
        return scale * math.fsum(shares**2) / math.fsum(shares)
    largest = float(sizes.max())  # so that no power of a tiny size is 0
    return largest * math.fsum((sizes / largest) ** 3) / math.fsum((sizes / largest) ** 2)
