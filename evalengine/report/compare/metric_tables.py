"""Scores, metrics and their changes in words: a table for the terminal, the sentences below it here and on the page,
and what stands beside a matrix's verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.numbers import MINUS, arrow, shown
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.metric_interval import cut_words
from evalengine.report.stats.paired import PairedResult
from evalengine.report.stats.significance import ALPHA
from evalengine.util.sheet import Sheet

LARGE = 1e6  # from this value on, digits after the point say nothing
MDE = "MDE: the smallest true difference that a test at 5 % finds 4 times in 5."


def leading_metrics(runs: Sequence[Run]) -> list[ScoreKey]:
    """The first metric of each task that all runs report, in the first run's order."""
    first: dict[str, ScoreKey] = {}
    for key in runs[0].results:
        if all(key in run.results for run in runs):
            first.setdefault(key[0], key)
    return list(first.values())


def metric_name(key: ScoreKey, several_tasks: bool) -> str:
    """A metric's name for people: `exact_match`, or `gsm8k exact_match` where there are several tasks."""
    return f"{key[0]} {key[1]}" if several_tasks else key[1]


def score_text(run: Run, key: ScoreKey) -> str:
    """A run's score for people: `77.0 %` for 0/1 scores, else four digits after the point."""
    value = run.results[key][0]
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    return f"{100 * value:.1f} %" if is_share(run, key) else f"{value:.4f}"


def change_text(a: Run, b: Run, key: ScoreKey) -> str:
    """The change from `a` to `b`: `-6.5 points`, `+0.0312`; "" where nothing changed, or the change is not finite."""
    change = b.results[key][0] - a.results[key][0]
    if not math.isfinite(change) or change == 0:
        return ""
    text = f"{100 * change:+.1f} points" if is_share(a, key) and is_share(b, key) else f"{change:+.4f}"
    return text.replace("-", MINUS)


def is_share(run: Run, key: ScoreKey) -> bool:
    """Whether every document scored 0 or 1."""
    return bool(run.scores.get(key)) and set(run.scores[key].values()) <= {0.0, 1.0}


def setting_words(names: Sequence[str], values: Sequence[str]) -> str:
    """The settings that set a run apart from the others: `exact, max_num_seqs 8`."""
    words = (
        value if name == "numerics" else f"{name} {value}" for name, value in zip(names, values, strict=True) if value
    )
    return ", ".join(sorted(words, key=lambda text: " " in text))


def setting_changes(names: Sequence[str], a: Sequence[str], b: Sequence[str]) -> str:
    """The settings in which two runs differ: `max_num_seqs 8 → 64`."""
    rows = zip(names, a, b, strict=True)
    return ", ".join(f"{name} {x or 'none'} → {y or 'none'}" for name, x, y in rows if x != y)


def look(c: Comparison) -> str:
    """What two runs are to each other, by which a cell is coloured, on pages and pictures alike: `same` (equal bits),
    `tokens` (the same tokens, or equal bits where compared), `some` (results differ, but no metric by more than chance
    explains) or `other` (a metric does, or no test can tell)."""
    if c.verdict == "IDENTICAL":
        return "tokens" if c.partial else "same"
    if c.verdict == "SAME TOKENS":
        return "tokens"
    tested = any(metric.paired is not None for metric in c.metrics)
    return "some" if tested and not moved(c) else "other"


def what_differs(c: Comparison) -> tuple[str, str]:
    """A cell's words: (`same tokens`, `logprobs differ in 16 of 16`)."""
    counts = f"{len(c.differences):,} of {c.common:,}"
    if c.verdict == "IDENTICAL":
        return "identical", ""
    if c.verdict == "SAME TOKENS":
        kind = "logprobs" if c.kinds["logprobs"] or not c.kinds["text"] else "texts"
        return "same tokens", f"{kind} differ in {counts}" if c.differences else ""
    return "different", f"outputs differ in {c.outputs:,} of {c.common:,}" if c.outputs else f"{counts} differ"


def moved(c: Comparison) -> bool:
    """Whether a metric changed by more than chance explains, as the paired tests over all metrics together say."""
    return any(metric.p_holm is not None and metric.p_holm < ALPHA for metric in c.metrics)


def metrics_table(metrics: Sequence[MetricDelta]) -> Sheet:
    """Each metric of both runs with the statistics of its pairs."""
    headings = ("Task", "Filter", "Metric", "", "A", "B", "B - A", "95% interval", "W/L/T", "p", "p (Holm)", "Test")
    rows = []
    for metric in metrics:
        task, name, filter_name = metric.key
        values = ["" if v is None else value_text(v) for v in metric.shown]
        cells = [delta(metric), *[""] * 6]
        if (p := metric.paired) is not None:
            between = interval(p, ", ")
            cells[1:] = [f"[{between}]" if between else "none", f"{p.wins}/{p.losses}/{p.ties}", *p_values(metric)]
            cells += [p.test, effect(p)]
        rows.append([task, filter_name, name, arrow(metric.higher_is_better), *values, *cells])
    return Sheet("Metrics", (*headings, "MDE"), rows, (0, 1, 2, 3, 11))


def value_text(number: float, sign: str = "") -> str:
    """A metric's value: four places after the point, six digits of a large one (the perplexity of a weak model)."""
    return shown(number, f"{sign}.4f" if not abs(number) >= LARGE else f"{sign}.6g")


def delta(metric: MetricDelta) -> str:
    """B - A over the same documents; "" where there is no difference."""
    return "" if metric.difference is None else value_text(metric.difference, "+")


def p_values(metric: MetricDelta) -> tuple[str, str]:
    """(p-value of the metric by itself, p-value adjusted by Holm for all tests); "" where there is no test."""
    raw = None if metric.paired is None else metric.paired.p_value
    first, second = ("" if value is None else f"{value:.3g}" for value in (raw, metric.p_holm))
    return first, second


def interval(p: PairedResult, between: str) -> str:
    """The confidence interval's ends; "" where one document leaves it without an end."""
    ends = (p.ci_low, p.ci_high)
    return between.join(shown(end, "+.4f") for end in ends) if all(map(math.isfinite, ends)) else ""


def effect(p: PairedResult) -> str:
    """The minimum detectable effect; `none` where no difference could be found."""
    return shown(p.minimum_detectable_effect, ".4f") if math.isfinite(p.minimum_detectable_effect) else "none"


def p_words(metrics: Sequence[MetricDelta]) -> str:
    """A sentence on what the two p-values are."""
    tests = sum(metric.p_holm is not None for metric in metrics)
    family = f"adjusted for the {tests} tests of this comparison" if tests > 1 else "the same, as there is one test"
    parts = any(metric.paired is not None and metric.p_holm is None for metric in metrics)
    of_groups = "; none for tasks of a group, whose mean is the test" if parts else ""
    return f"p: two-sided, of each metric by itself; p (Holm): {family}{of_groups}."


def cut_notes(metrics: Sequence[MetricDelta], a: Run, b: Run) -> Iterator[str]:
    """What the length limit cut in either run, beside each metric that it touches."""
    for metric in metrics:
        if words := cut_words(metric.key, {"A": a, "B": b}):
            yield f"{', '.join(metric.key)}: {words}."


def units(metrics: Sequence[MetricDelta]) -> str:
    """What the statistics pair: `documents`, or `documents (of log-likelihoods per window: windows)`."""
    windows = any(metric.unit == "window" for metric in metrics)
    return "documents (of log-likelihoods per window: windows)" if windows else "documents"


def cautions(metric: MetricDelta) -> Iterator[str]:
    """Why the interval of a metric's difference may be too narrow."""
    for why in () if metric.paired is None else metric.paired.cautions:
        yield f"{', '.join(metric.key)}: {why}."


def pairing_notes(metrics: Sequence[MetricDelta]) -> Iterator[str]:
    """What a metric's numbers are computed from, where that is not all documents, each by itself."""
    for metric in metrics:
        name = ", ".join(metric.key)
        if metric.apart:
            yield f"{name}: no difference is given: {metric.apart}."
        elif metric.shown != (metric.value_a, metric.value_b) and metric.unit == "document":
            reported = " and ".join("none" if v is None else value_text(v) for v in (metric.value_a, metric.value_b))
            yield f"{name}: over the documents of both runs; as reported, over all of each: {reported}."
        if metric.unit == "window" and metric.paired is not None:
            sample = f"{metric.paired.n} windows of {metric.paired.clusters} documents"
            yield f"{name}: {sample}; interval, p and MDE take each document as one (clustered)."
        elif metric.paired is not None and metric.paired.clusters < metric.paired.n:
            sample = f"{metric.paired.n} documents in {metric.paired.clusters} clusters of related ones"
            yield f"{name}: {sample}; interval, p and MDE take each cluster as one."
        yield from cautions(metric)
        if metric.left_out:
            measure = "score" if metric.unit == "document" else "log-likelihood of the same tokens in both"
            yield f"{name}: {metric.left_out} {metric.unit}s without a finite {measure} are left out of the statistics."
