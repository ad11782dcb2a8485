"""A comparison in one sentence to decide by: how much better or worse, how sure, and what would settle it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.item_differences import OF_ANSWER
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.numbers import counted, p_value, shown
from evalengine.report.read.groups import above
from evalengine.report.stats.detectable import critical_flips, critical_mean, mcnemar_power
from evalengine.report.stats.loss_bound import LossBound
from evalengine.report.stats.paired import PairedResult
from evalengine.report.stats.significance import ALPHA

POWER = 0.8  # of the test with as many documents as are said to be needed
FEW_CHANGED = 10  # with fewer changed documents (or clusters), no number of documents is said to be needed
MOST = 100_000_000  # no set of documents is larger
NO_BITS = "there are no bits to compare"
# The adjusted p above which a difference is no reason to ask more documents: a number named for every difference that
# was seen was named for 82 of 100 pairs without one.
WITHIN_CHANCE = 0.2
MANY = 10  # tasks of groups that stand in one table with the groups


def documents_to_tell(p: PairedResult, alpha: float = ALPHA) -> int | None:
    """The fewest documents like these on which the two-sided test finds, at level `alpha` and with probability `POWER`,
    a difference that is as large as the observed one; None where none was observed, or more than `MOST` would be
    needed. alpha: of several tests the level that Holm's correction leaves this one, ALPHA p / p_holm.

    This is not the gate's number, which is of documents that show that there is no loss beyond the margin. What is
    unknown here is the share of pairs that differ: the power at this number, if the difference is as large as seen, was
    .78 to .88 on average (simulated, 24 to 500 documents of which `FEW_CHANGED` or more changed). If the difference is
    smaller than seen, the power is lower: .02 to .27 where 4 of 24 to 50 documents changed. For so few, none is shown.

    For McNemar's test by its exact power at the observed share of pairs that differ (`mcnemar_power`); for others where
    the difference exceeds the test's critical one (`critical_mean`, `critical_flips`) by t_power standard errors, with
    as many degrees of freedom as clusters that changed, less one: with z for t, the power was .75 of 50 documents of
    which 15 changed. The standard error is divided by the root of the number of documents, the unit by the number.
    """
    size = abs(p.difference)
    if size == 0 or not math.isfinite(p.stderr):
        return None
    discordance, degrees = (p.wins + p.losses) / p.n, max(1.0, _changed(p) - 1)

    def enough(count: int) -> bool:
        if p.test == "mcnemar-exact":
            return mcnemar_power(count, discordance, min(size, discordance), alpha) >= POWER
        times, groups = count / p.n, max(1, p.clusters * count // p.n)
        unit = p.unit / times
        seen = LossBound(0.0, p.stderr / math.sqrt(times), unit, unit, degrees, 0.5, groups)
        critical = max(critical_mean(seen, p.scale, alpha, 2), critical_flips(seen, alpha / 2))
        return size >= critical + float(scipy.special.stdtrit(degrees, POWER)) * seen.stderr

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _changed(p: PairedResult) -> float:
    """The documents that changed; of related ones about how many clusters did."""
    return (p.wins + p.losses) * p.clusters / p.n


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
    """`B is 1.0 points better, could be -0.3 to +2.3: undecided; if it is that large, about 1,700 documents show it
    with probability 0.8`. Positive is better, also where less of the metric is.

    p_adjusted: the p that decides, after the correction for all tests. all_asked: whether there are no more documents.
    who, than: the names of the two, if they are not A and B.
    """
    change, low, high = _oriented(p, scale)
    against = f" than {than}" if than else ""
    said = f"{who} is neither better nor worse{against}"
    if change:
        said = f"{who} is {_size(abs(change), scale)}{scale.unit} {'better' if change > 0 else 'worse'}{against}"
    if not (math.isfinite(low) and math.isfinite(high)):
        one = f"one {scale.counted}" if p.n == 1 else f"{p.n:,} related {scale.counted}s, one cluster,"
        return f"{said}; {one} cannot tell whether that is chance"
    said += f", could be {_size(low, scale, '+')} to {_size(high, scale, '+')}"
    if p_adjusted < ALPHA:
        return f"{said}: a real difference (p {p_value(p_adjusted)})"
    if change == 0:
        return f"{said}: no difference seen in {p.n:,} {scale.counted}s"
    need = documents_to_tell(p, ALPHA * p.p_value / p_adjusted) if p_adjusted <= WITHIN_CHANCE else None
    if need is None:
        return f"{said}: undecided; {p.n:,} {scale.counted}s show no difference"
    if _changed(p) < FEW_CHANGED:
        few = counted(p.wins + p.losses, scale.counted)
        return f"{said}: undecided; only {few} changed, too few to estimate how many would settle it"
    more = f"about {_rounded(max(need, p.n + 1)):,} {scale.counted}s"
    condition = f"if it is that large, {more} show it with probability {POWER:g}"
    return f"{said}: undecided; {condition}{f', and the set has {p.n:,}' if all_asked else ''}"


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


def headline(c: Comparison, names: tuple[str, str] | None = None) -> str:
    """The sentence, without a full stop. names: of the two runs, if they are not A and B."""
    a, b = names or ("A", "B")
    metric = leading(c)
    if c.verdict == "IDENTICAL":
        return f"{a} and {b} are the same, bit for bit{_on_both(c)}"
    if c.verdict == "SAME TOKENS":
        return f"Every output and every answer is the same{_on_both(c)}; {_logprobs(c)}"
    if metric is None or metric.paired is None:
        return f"{a} and {b} differ, and no metric has a number per document by which they could be tested{_on_both(c)}"
    others = [m for m in asked_for(c) if m is not metric]
    name = f"On {' '.join(part for part in metric.key if part not in ('none', ''))}, " if others else ""
    said = f"{name}{difference_words(metric, c.a.asks_all and c.b.asks_all and not c.partial, names)}"
    if not others:
        return said
    sure = sum(_sure(m) for m in others)
    rest = f"{sure} more" if sure else "no other"
    return f"{said}; {rest} of the {len(others) + 1} metrics changed by more than chance explains"


def leading(c: Comparison) -> MetricDelta | None:
    """The metric of the sentence: the first of the only task or group that was asked for; of several, the one whose
    change is the least likely chance."""
    tested = asked_for(c)
    return min(tested, key=lambda m: (not _sure(m), _p(m)), default=None)


def asked_for(c: Comparison) -> list[MetricDelta]:
    """The first tested metric of every group and task that is part of no other group."""
    first: dict[str, MetricDelta] = {}
    for metric in c.metrics:
        if metric.paired is not None and metric.p_holm is not None and not metric.nats:
            first.setdefault(metric.key[0], metric)
    return [metric for task, metric in first.items() if not any(group in first for group in above(c.a.groups, task))]


def parts_of_groups(c: Comparison) -> list[MetricDelta]:
    """The metrics of tasks in tested groups, if there are more than a table shows well."""
    inside = [metric for metric in c.metrics if metric.paired is not None and metric.p_holm is None]
    return inside if len(inside) > MANY else []


def difference_words(metric: MetricDelta, all_asked: bool = False, names: tuple[str, str] | None = None) -> str:
    """`test_words` of a metric.

    all_asked: whether the runs asked every document that there is. names: of the two runs, if they are not A and B."""
    assert metric.paired is not None
    share = all(value is not None and 0 <= value <= 1 for value in metric.shown)
    unit = " points" if share else " nats" if metric.nats else ""
    scale = Scale(share, unit, metric.higher_is_better, metric.unit)
    than, who = names or ("", "B")
    return test_words(metric.paired, _p(metric), scale, all_asked, who, than)


def changed_words(c: Comparison) -> str:
    """`39 documents changed: 31 scores, 8 answers only`."""
    documents = c.changed
    if not documents:
        return "no answer changed"
    alone = sum(c.answers.get(change, 0) for change in OF_ANSWER)
    parts = [counted(documents - alone, "score"), counted(alone, "answer") + " only"]
    kept = [part for part, number in zip(parts, (documents - alone, alone), strict=True) if number]
    return f"{counted(documents, 'document')} changed: {', '.join(kept)}"


def _logprobs(c: Comparison) -> str:
    if count := c.kinds["logprobs"]:
        return f"logprobs differ in {count:,} of {c.common:,} requests"
    if c.kinds["text"]:
        return f"{counted(c.kinds['text'], 'text')} of equal tokens differ"
    return NO_BITS


def _on_both(c: Comparison) -> str:
    return f" on the {c.common:,} requests of both" if c.partial else ""


def _p(metric: MetricDelta) -> float:
    """The p that counts: adjusted for all tests of the comparison."""
    return 1.0 if metric.p_holm is None else metric.p_holm


def _sure(metric: MetricDelta) -> bool:
    return _p(metric) < ALPHA
