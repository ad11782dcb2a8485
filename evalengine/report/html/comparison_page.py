"""Two runs side by side as a page: verdict, comparability, attribution, divergence map, flips, statistics; and the
section of a noise floor, fast against invariant numerics on the same inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from evalengine.records.manifest_data import resumed_fast
from evalengine.report.compare.comparability import resumed_words
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.headline import asked_for, changed_words, headline, parts_of_groups, scope
from evalengine.report.compare.item_differences import KINDS, score_unchanged
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.compare.report import (
    AGGREGATED,
    MDE,
    answers_sheet,
    cut_notes,
    delta,
    effect,
    evidence,
    logprob_lines,
    near_ties,
    p_values,
    p_words,
    pairing_notes,
    units,
    value_text,
)
from evalengine.report.compare.report import interval as interval_text
from evalengine.report.html.differences import flips_grid, outputs_grid, parting, regressions_section
from evalengine.report.html.map_section import map_section
from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, facts, lines_of, origin_line, sheet_table, table, tiles, verdict
from evalengine.report.html.plots import interval, percent
from evalengine.report.numbers import counted, shown
from evalengine.report.read.groups import roots_of
from evalengine.report.read.run import Run
from evalengine.report.stats.paired import PairedResult

TILES = 3  # metrics shown large
FOLDED = "of the groups' own tasks, outside the family of tests"
LEVEL = 0.05  # a worse metric colours the verdict if its adjusted p-value is at most this
GOOD = {"IDENTICAL": True, "SAME TOKENS": None, "DIFFERENT": False}
TESTS = {"mcnemar-exact": "exact McNemar on the pairs that differ", "permutation": "paired permutation",
         "bound": "the p at which the interval excludes 0"}  # fmt: skip


def comparison_page(c: Comparison) -> Page:
    """A comparison as a page, the verdict first."""
    page = Page(title(c.a, "Two"), eyebrow="Comparison", scripts=("comparison.js", "map_picture.js", "map.js"))
    numbers = evidence(c)
    page.lead(verdict(f"{headline(c)}.", f"{c.verdict}{scope(c)}: {numbers}.", _good(c)), tiles(_figures(c)), _runs(c))
    regressions_section(page, c)
    page.section("comparability", "Comparability", *_comparability(c))
    if c.causes:
        page.section("attribution", "Attribution", *_attribution(c))
    map_section(page, c)
    if c.flips:
        note = "Documents whose answer or score is another one in B; of given choices, under each metric."
        page.section("flips", "Flips", sheet_table(answers_sheet(c)), flips_grid(page, c), note=note)
    if parting(c):
        page.section("outputs", "Outputs that part", outputs_grid(page, c), note=" ".join(near_ties(c)) or None)
    if c.metrics:
        page.section("statistics", "Paired statistics", *_statistics(c))
    return page


def title(run: Run, count: str) -> str:
    """A page's title, `Two runs of gsm8k`; the tasks of one run stand for those of all."""
    tasks = roots_of(run.groups, [*dict.fromkeys(key[0] for key in run.results)]) or sorted({k[0] for k in run.items})
    return f"{count} runs of {', '.join(tasks) if len(tasks) <= 3 else f'{len(tasks)} tasks'}"


def _figures(c: Comparison) -> Iterator[tuple[str, str, str | None]]:
    yield from _first_metric(c)
    outside = c.only_a + c.only_b
    yield "Requests compared", f"{c.common:,}", f"{outside:,} only in one run" if outside else None
    for kind, basis in (("document", "of the requests"), ("prompt", "of the requests"), ("text", "of the same tokens")):
        if c.kinds[kind]:
            yield f"{kind.capitalize()}s that differ", f"{c.kinds[kind]:,}", basis
    yield "Outputs that part", f"{c.outputs:,}", f"{c.outputs / c.common:.1%}" if c.outputs else None
    yield "Documents that changed", f"{c.changed:,}", changed_words(c).partition(": ")[2] or None


def _first_metric(c: Comparison) -> Iterator[tuple[str, str, str | None]]:
    """A tile for each of the first metrics that were asked for: its values in A and B, and its p-value."""
    for metric in asked_for(c)[:TILES] if c.verdict == "DIFFERENT" else ():
        share = all(value is not None and 0 <= value <= 1 for value in metric.shown)
        values = ["" if v is None else shown(100 * v, ".1f") if share else shown(v, ".4g") for v in metric.shown]
        p, holm = p_values(metric)
        tests = sum(m.p_holm is not None for m in c.metrics)
        several = f", after Holm over {tests}: {holm}" if tests > 1 else ""
        yield f"{' '.join(metric.key[:2])}{', %' if share else ''}", " → ".join(values), f"p {p}{several}"


def _good(c: Comparison) -> bool | None:
    """Whether the verdict is good news: False where a metric got worse by more than chance explains, or no test is."""
    tests = [m for m in c.metrics if m.paired is not None and m.p_holm is not None and not m.nats]
    if c.verdict != "DIFFERENT" or not tests:
        return GOOD[c.verdict]
    worse = [m for m in tests if m.p_holm is not None and m.p_holm <= LEVEL and _worse(m)]
    return False if worse else None


def _worse(m: MetricDelta) -> bool:
    change = m.difference or 0.0
    return change != 0 and (change < 0) == (m.higher_is_better is not False)


def _runs(c: Comparison) -> Markup:
    digests = [tag("code", run.digest or "no digest", class_="under") for run in (c.a, c.b)]
    return facts((label, join(str(run.source), digest, origin_line(run)))
                 for label, run, digest in zip("AB", (c.a, c.b), digests, strict=True))  # fmt: skip


def _comparability(c: Comparison) -> Iterator[Markup]:
    if c.unlike:
        yield tag("p", "Compared although they are unlike:")
        yield listed(c.unlike)
    else:
        what = "documents, prompts, weights, tokenizer and generation settings"
        same = f"Nothing that both runs recorded of their {what} differs."
        yield tag("p", same if c.unchecked else f"The runs asked the same of the same model: equal {what}.")
    if c.settings:
        yield tag("p", "Settings that may change bits:")
        yield listed(c.settings)
    if c.unchecked:
        yield tag("p", "Not known:")
        yield listed(c.unchecked)
    if c.surroundings:
        yield details(f"Also different around the runs ({len(c.surroundings)})", listed(c.surroundings))


def _attribution(c: Comparison) -> Iterator[Markup]:
    counts = {x: Counter(kind for d in c.differences if d.cause == x for kind in d.kinds) for x in c.causes}
    kinds = [kind for kind in KINDS if c.kinds[kind] or kind in ("output", "logprobs")]
    head = ("Cause", "Items", *(kind.capitalize() for kind in kinds), "What it means")
    rows = [
        (
            cause,
            f"{count:,}",
            *(f"{counts[cause][kind]:,}" for kind in kinds),
            # A narrow screen must not press words into a column of letters.
            tag("span", "; ".join(c.why.get(cause, [])), class_="words"),
        )
        for cause, count in c.causes.items()
    ]
    yield table(head, rows, numbers=range(1, 2 + len(kinds)))
    if c.tensors:
        yield tag("p", "Weights that differ:")
        yield listed(c.tensors)
    if c.rescored and not c.flips:
        yield tag("p", AGGREGATED)
    yield from lines_of(logprob_lines(c.logprobs, ulps=True) if c.logprobs is not None else ())


def _statistics(c: Comparison) -> Iterator[Markup]:
    pairs = [m.paired for m in c.metrics if m.paired is not None]
    reach = {nats: _reach(m.paired for m in c.metrics if m.paired and m.nats is nats) for nats in (False, True)}
    head = ("Metric", "A", "B", "B − A", "", "95 % interval", "Won / lost / equal", "p", "p (Holm)", "MDE")
    inside = parts_of_groups(c)
    for name, own in {"": [m for m in c.metrics if m not in inside], FOLDED: inside}.items():
        drawn = table(head, [_metric(m, reach[m.nats]) for m in own], numbers=(1, 2, 3, 5, 6, 7, 8, 9))
        if own:
            yield details(f"{counted(len(own), 'metric')} {name}", drawn) if name else drawn
    tests = sorted({TESTS[p.test] for p in pairs})
    yield tag("p", f"Won, lost, equal: {units(c.metrics)} on which B is better, worse and equal. "
                   f"Tests: {' and '.join(tests) or 'none'}. {p_words(c.metrics)} {MDE}", class_="note")  # fmt: skip
    yield from (tag("p", note, class_="note") for note in pairing_notes(c.metrics))
    yield from (tag("p", note, class_="note") for note in cut_notes(c.metrics, c.a, c.b))


def _reach(pairs: Iterable[PairedResult]) -> float:
    """How far from 0 these intervals reach, for the scale that they share."""
    ends = (abs(e) for p in pairs for e in (p.ci_low, p.ci_high, p.difference) if math.isfinite(e))
    return max(ends, default=0.0) or 1.0


def _metric(metric: MetricDelta, reach: float) -> list[str | Markup | None]:
    task, name, filter_name = metric.key
    direction = {True: "up", False: "down", None: None}[metric.higher_is_better]
    p = metric.paired
    named = join(tag("span", name, class_=direction), tag("span", f"{task}, {filter_name}", class_="under"))
    first = [named, *("" if v is None else value_text(v) for v in metric.shown), delta(metric)]
    if p is None:
        return [*first, None, *[""] * 5]
    drawn = None
    if between := interval_text(p, " … "):
        drawn = interval(p.difference, p.ci_low, p.ci_high, (-reach, reach), rule=0)
    counts = f"{p.wins:,} / {p.losses:,} / {p.ties:,}"
    return [*first, drawn, between or "none", counts, *p_values(metric), effect(p)]


def listed(lines: Sequence[str]) -> Markup:
    """Sentences as a list."""
    return tag("ul", *(tag("li", line) for line in lines), class_="plain")


def noise_floor(a: Run, b: Run) -> Comparison:
    """How far the arithmetic alone moves a result: the runs of a pair (`sibling_runs.is_pair`), in either order."""
    return compare(b, a) if a.manifest.numerics == "fast" else compare(a, b)


def noise_floor_section(page: Page, floor: Comparison) -> None:
    """Flips, metric deltas, the largest logprob change, and both runs' time. floor: as `noise_floor` gives it."""
    invariant, fast, metrics = floor.a, floor.b, floor.metrics
    several = len({metric.key[0] for metric in metrics}) > 1
    head = ["Task"] * several + ["Metric", str(invariant.manifest.numerics), "fast", "Delta"]
    head += ["Better in fast", "Worse in fast", "Filter"]
    drawn = table(head, [list(_floor_row(m, several)) for m in metrics], numbers=range(1 + several, 6 + several))
    sources = facts(
        (f"{run.manifest.numerics}, {_seconds(run)}", tag("code", run.source.name)) for run in (invariant, fast)
    )
    note = (
        "The same inputs under both kinds of arithmetic. A difference between two fast runs that is no larger than "
        "this says nothing about the model."
    )
    if resumed := resumed_fast(fast.manifest):
        note += f" The fast run {resumed_words(fast, resumed)}."
    page.section("noise", "Noise floor: fast against invariant", tiles(_floor_tiles(floor)), drawn, sources, note=note)


def _floor_tiles(floor: Comparison) -> Iterator[tuple[str, Child, Child]]:
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


def _floor_row(metric: MetricDelta, several: bool) -> Iterator[Child]:
    task, name, filter_name = metric.key
    if several:
        yield task
    yield name
    a, b, paired = metric.value_a, metric.value_b, metric.paired
    yield from ("" if value is None else shown(value, ".4f") for value in (a, b))
    yield "" if a is None or b is None else shown(b - a, "+.4f")
    yield from ("", "") if paired is None else (f"{paired.wins:,}", f"{paired.losses:,}")
    yield filter_name


def _seconds(run: Run) -> str:
    seconds, num_resumed = run.manifest.timings.run_seconds, run.manifest.counts.resumed_requests
    return f"{seconds:,.1f} s" + (" (resumed)" if num_resumed else "")
