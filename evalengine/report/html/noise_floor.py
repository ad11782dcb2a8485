"""The noise floor on a page: fast against invariant numerics, on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator

from evalengine.records.manifest import resumed_fast
from evalengine.report.compare.comparability import resumed_words
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.flips import score_unchanged
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.html.markup import Child, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import facts, table, tiles
from evalengine.report.html.plots import percent
from evalengine.report.numbers import shown
from evalengine.report.read.run import Run


def noise_floor(a: Run, b: Run) -> Comparison:
    """How far the runs of a pair (`beside.is_pair`) lie apart, given in either order: A is the invariant one, B the
    fast: how far the arithmetic alone moves a result."""
    return compare(b, a) if a.manifest.numerics == "fast" else compare(a, b)


def noise_floor_section(page: Page, floor: Comparison) -> None:
    """Flips, metric deltas, the largest logprob change, and both runs' time. floor: as `noise_floor` gives it."""
    invariant, fast, metrics = floor.a, floor.b, floor.metrics
    several = len({metric.key[0] for metric in metrics}) > 1
    head = ["Task"] * several + ["Metric", str(invariant.manifest.numerics), "fast", "Delta"]
    head += ["Better in fast", "Worse in fast", "Filter"]
    drawn = table(head, [list(_row(m, several)) for m in metrics], numbers=range(1 + several, 6 + several))
    sources = facts((f"{_level(run)}, {_seconds(run)}", tag("code", run.source.name)) for run in (invariant, fast))
    note = (
        "The same inputs under both kinds of arithmetic. A difference between two fast runs that is no larger than "
        "this says nothing about the model."
    )
    if resumed := resumed_fast(fast.manifest):
        note += f" The fast run {resumed_words(fast, resumed)}."
    page.section("noise", "Noise floor: fast against invariant", tiles(_figures(floor)), drawn, sources, note=note)


def _figures(floor: Comparison) -> Iterator[tuple[str, Child, Child]]:
    alone = score_unchanged(floor.flips)
    yield "Requests whose bits differ", f"{len(floor.differences):,}", f"of {floor.common:,}"
    yield "Outputs that part", f"{floor.outputs:,}", f"of {floor.common:,}"
    basis = f"of {floor.documents:,} documents{f'; {alone}' if alone else ''}"
    yield "Answers that flipped", f"{floor.changed:,}", basis
    differing, compared = floor.logprob_counts
    if compared:
        unknown = floor.logprobs.not_finite if floor.logprobs else 0
        share = f"{percent(differing / compared)} of {compared:,} logprobs differ"
        share += f"; {unknown:,} have no distance: NaN or infinite" if unknown else ""
        yield "Largest logprob change", floor.largest, share


def _row(metric: MetricDelta, several: bool) -> Iterator[Child]:
    task, name, filter_name = metric.key
    if several:
        yield task
    yield name
    a, b, paired = metric.value_a, metric.value_b, metric.paired
    yield from ("" if value is None else shown(value, ".4f") for value in (a, b))
    yield "" if a is None or b is None else shown(b - a, "+.4f")
    yield from ("", "") if paired is None else (f"{paired.wins:,}", f"{paired.losses:,}")
    yield filter_name


def _level(run: Run) -> str:
    return str(run.manifest.numerics)


def _seconds(run: Run) -> str:
    seconds, num_resumed = run.manifest.timings.run_seconds, run.manifest.counts.resumed_requests
    return f"{seconds:,.1f} s" + (" (resumed)" if num_resumed else "")
