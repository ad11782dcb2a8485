"""A paired test in words: how much better or worse, between which bounds, and whether that is decided."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evalengine.report.compare.matrix_scores import ALPHA
from evalengine.report.numbers import p_value, shown
from evalengine.report.stats.documents_to_tell import documents_to_tell
from evalengine.report.stats.paired import PairedResult


@dataclass(frozen=True)
class Scale:
    """How a metric's differences are shown."""

    share: bool  # as points of 100
    unit: str  # " points", " nats" or ""
    higher_is_better: bool | None
    counted: str = "document"  # what the statistics pair


def test_words(
    p: PairedResult, p_adjusted: float, scale: Scale, all_asked: bool = False, who: str = "B", than: str = ""
) -> str:
    """`B is 1.0 points better, could be -3.3 to +5.3: undecided; about 1,700 documents would tell`. Positive is better,
    also where less of the metric is.

    p_adjusted: the p that decides, after the correction for all tests. all_asked: whether there are no more documents.
    who, than: the names of the two, if they are not A and B.
    """
    change, low, high = _oriented(p, scale)
    against = f" than {than}" if than else ""
    said = f"{who} is neither better nor worse{against}"
    if change:
        said = f"{who} is {_size(abs(change), scale)}{scale.unit} {'better' if change > 0 else 'worse'}{against}"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{said}; one {scale.counted} cannot tell whether that is chance"
    said += f", could be {_size(low, scale, '+')} to {_size(high, scale, '+')}"
    if p_adjusted < ALPHA:
        return f"{said}: a real difference (p {p_value(p_adjusted)})"
    need = documents_to_tell(p)
    if need is None:
        return f"{said}: no difference seen in {p.n:,} {scale.counted}s"
    told = f"about {_rounded(max(need, p.n + 1)):,} {scale.counted}s would tell"
    return f"{said}: undecided; {told}{f', and the set has {p.n:,}' if all_asked else ''}"


def _oriented(p: PairedResult, scale: Scale) -> tuple[float, float, float]:
    """A change and its interval's ends, positive where the second is better."""
    if scale.higher_is_better is False:
        return -p.difference, -p.ci_high, -p.ci_low
    return p.difference, p.ci_low, p.ci_high


def _size(value: float, scale: Scale, sign: str = "") -> str:
    return shown(100 * value, f"{sign}.1f") if scale.share else shown(value, f"{sign}.4g")


def _rounded(count: int) -> int:
    """A count to two significant digits, upwards: more would be false precision."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step
