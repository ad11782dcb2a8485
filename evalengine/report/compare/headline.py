"""A comparison in one sentence to decide by: how much better or worse, how sure, and what would settle it."""

from __future__ import annotations

import math

import scipy

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.item_differences import OF_ANSWER
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.numbers import counted, p_value, shown
from evalengine.report.read.groups import above
from evalengine.report.read.run import key_name
from evalengine.report.stats.detectable import critical_flips, critical_mean, mcnemar_power
from evalengine.report.stats.loss_bound import LossBound
from evalengine.report.stats.paired import PairedResult
from evalengine.report.stats.significance import ALPHA

POWER = 0.8  # of the test with as many documents as are reported to be needed
FEW_CHANGED = 10  # with fewer changed documents (or clusters), no number of documents is reported
MOST = 100_000_000  # no set of documents is larger
NO_BITS = "there are no bits to compare"
# The adjusted p above which a difference is no reason to ask more documents: a number named for every difference that
# was seen was named for 82 of 100 pairs without one.
WITHIN_CHANCE = 0.2
MANY = 10  # tasks of groups in one table with the groups


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


def test_words(
    p: PairedResult,
    p_adjusted: float,
    share: bool,
    unit: str,
    higher_is_better: bool | None,
    counts: str = "document",
    all_asked: bool = False,
    who: str = "B",
    than: str = "",
) -> str:
    """`B 1.0 points better (95 % CI -0.3 to +2.3): not significant; detecting a difference this large takes about 1,700
    documents (power 0.8)`. Positive is better, also where less of the metric is.

    p_adjusted: the p that decides, after the correction for all tests. share: whether differences are shown as points
    of 100. unit: " points", " nats" or "". counts: what the statistics pair. all_asked: whether there are no more
    documents. who, than: the names of the two, if they are not A and B.
    """

    def size(value: float, sign: str = "") -> str:
        return shown(100 * value, f"{sign}.1f") if share else shown(value, f"{sign}.4g")

    change, low, high = p.difference, p.ci_low, p.ci_high
    if higher_is_better is False:
        change, low, high = -change, -high, -low
    amount = f"{size(abs(change))}{unit} {'better' if change > 0 else 'worse'}" if change else "no better and no worse"
    said = f"{who} {amount}{f' than {than}' if than else ''}"
    if not (math.isfinite(low) and math.isfinite(high)):
        one = f"one {counts}" if p.n == 1 else f"{p.n:,} related {counts}s, one cluster,"
        return f"{said}: {one} cannot be tested"
    said += f" (95 % CI {size(low, '+')} to {size(high, '+')})"
    if p_adjusted < ALPHA:
        return f"{said}: significant (p {p_value(p_adjusted)})"
    said += ": not significant after Holm's correction" if p.p_value < ALPHA else ": not significant"
    need = documents_to_tell(p, ALPHA * p.p_value / p_adjusted) if change and p_adjusted <= WITHIN_CHANCE else None
    if need is None:
        return f"{said} over {p.n:,} {counts}s"
    if _changed(p) < FEW_CHANGED:
        return f"{said}; only {counted(p.wins + p.losses, counts)} changed, too few to estimate how many it takes"
    need = max(need, p.n + 1)
    step = 10 ** max(0, len(str(need)) - 2)  # two significant digits, upwards: more would be false precision
    takes = f"detecting a difference this large takes about {-(-need // step) * step:,} {counts}s (power {POWER:g})"
    return f"{said}; {takes}{f', and the task has {p.n:,}' if all_asked else ''}"


def headline(c: Comparison, names: tuple[str, str] | None = None) -> str:
    """The sentence, without a full stop. names: of the two runs, if they are not A and B."""
    a, b = names or ("A", "B")
    if c.verdict == "IDENTICAL":
        if c.contracts:
            return (
                f"{a} and {b} have equal outputs and logprobs{scope(c)}, by {c.contracts}, under which bits may differ"
            )
        return f"{a} and {b} are the same, bit for bit{scope(c)}"
    if c.verdict == "SAME TOKENS":
        bits = f"{counted(c.kinds['text'], 'text')} of equal tokens differ" if c.kinds["text"] else NO_BITS
        if count := c.kinds["logprobs"]:
            bits = f"logprobs differ in {count:,} of {c.common:,} requests"
        return f"Every output and every answer is the same{scope(c)}; {bits}"
    # Of several tasks and groups, the one whose change is the least likely chance.
    metric = min(asked_for(c), key=p_of, default=None)
    if metric is None or metric.paired is None:
        return f"{a} and {b} differ, and no metric has a number per document by which they could be tested{scope(c)}"
    others = [m for m in asked_for(c) if m is not metric]
    share = all(value is not None and 0 <= value <= 1 for value in metric.shown)
    unit = " points" if share else " nats" if metric.nats else ""
    all_asked, (than, who) = c.a.asks_all and c.b.asks_all and not c.partial, names or ("", "B")
    better = metric.higher_is_better
    said = test_words(metric.paired, p_of(metric), share, unit, better, metric.unit, all_asked, who, than)
    if not others:
        return said
    sure = sum(p_of(m) < ALPHA for m in others)
    rest = f"{sure} more" if sure else "no other"
    return f"On {key_name(metric.key)}, {said}; {rest} of the {len(others) + 1} metrics changed significantly"


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


def changed_words(c: Comparison) -> str:
    """`39 documents changed: 31 scores, 8 answers only`."""
    documents = c.changed
    if not documents:
        return "no answer changed"
    alone = sum(c.answers.get(change, 0) for change in OF_ANSWER)
    parts = [counted(documents - alone, "score"), counted(alone, "answer") + " only"]
    counts = [part for part, number in zip(parts, (documents - alone, alone), strict=True) if number]
    return f"{counted(documents, 'document')} changed: {', '.join(counts)}"


def scope(c: Comparison) -> str:
    """The part of the runs that the verdict covers; "" if it covers everything that was run."""
    return f" on the {c.common:,} requests of both" if c.partial else ""


def p_of(metric: MetricDelta) -> float:
    """The p that counts: adjusted for all tests of the comparison."""
    return 1.0 if metric.p_holm is None else metric.p_holm
