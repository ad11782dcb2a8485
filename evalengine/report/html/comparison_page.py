"""Two runs side by side as a page: verdict, comparability, attribution, divergence map, flips, statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from evalengine.report.compare import Comparison
from evalengine.report.compare_tables import CAUSES, evidence, near_ties, pairing_notes, scope, units
from evalengine.report.html.differences import flips_grid, outputs_grid, parting
from evalengine.report.html.map_section import map_section
from evalengine.report.html.markup import Markup, join, tag
from evalengine.report.html.origin import origin_line
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, facts, table, tiles, verdict
from evalengine.report.html.plots import interval
from evalengine.report.metric_deltas import MetricDelta
from evalengine.report.runs import Run
from evalengine.report.statistics import PairedResult

GOOD = {"IDENTICAL": True, "SAME TOKENS": None, "DIFFERENT": False}
TESTS = {"mcnemar-exact": "exact McNemar on the pairs that differ", "permutation": "paired permutation"}


def comparison_page(c: Comparison) -> Page:
    """Everything that `compare` found, the verdict first."""
    page = Page(title(c.a, "Two"), eyebrow="Comparison", scripts=("comparison.js", "map_picture.js", "map.js"))
    found = evidence(c)
    sentence = f"{found[0].upper()}{found[1:]}."
    page.lead(verdict(f"{c.verdict}{scope(c)}", sentence, GOOD[c.verdict]), tiles(_figures(c)), _runs(c))
    page.section("comparability", "Comparability", *_comparability(c))
    if c.causes:
        page.section("attribution", "Attribution", *_attribution(c))
    map_section(page, c)
    if c.flips:
        page.section("flips", "Flips", flips_grid(page, c), note="Documents whose answer or score is another one in B.")
    if parting(c):
        page.section("outputs", "Outputs that part", outputs_grid(page, c), note=" ".join(near_ties(c)) or None)
    if c.metrics:
        page.section("statistics", "Paired statistics", *_statistics(c))
    return page


def title(run: Run, count: str) -> str:
    """`Two runs of gsm8k`: the tasks of one run stand for those of all."""
    tasks = sorted({key[0] for key in run.items})
    return f"{count} runs of {', '.join(tasks) if len(tasks) <= 3 else f'{len(tasks)} tasks'}"


def _figures(c: Comparison) -> Iterator[tuple[str, str, str | None]]:
    outside = c.only_a + c.only_b
    yield "Requests compared", f"{c.common:,}", f"{outside:,} only in one run" if outside else None
    outputs = len(parting(c))
    yield "Outputs that part", f"{outputs:,}", f"{outputs / c.common:.1%}" if outputs else None
    documents = {(flip.task, flip.doc_id) for flip in c.flips}
    yield "Answers that flipped", f"{len(documents):,}", None
    if (change := c.logprobs) is not None:
        yield "Logprobs that differ", f"{change.differing:,}", f"of {change.compared:,} in requests that differ"
        yield "Largest |Δ logprob|", f"{change.max_abs:.3g}", f"nat; {change.max_ulps:,} float32 ulps"


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
        known = f"Nothing that both runs recorded of their {what} differs."
        yield tag("p", known if c.unchecked else f"The runs asked the same of the same model: equal {what}.")
    if c.settings:
        yield tag("p", "Settings that may change bits:")
        yield listed(c.settings)
    if c.unchecked:
        yield tag("p", "Not known:")
        yield listed(c.unchecked)
    if c.surroundings:
        yield details(f"Also different around the runs ({len(c.surroundings)})", listed(c.surroundings))


def _attribution(c: Comparison) -> Iterator[Markup]:
    whats = {cause: Counter(d.what for d in c.differences if d.cause == cause) for cause in c.causes}
    head = ("Cause", "Items", "Prompt", "Output", "Logprobs", "What it means")
    rows = [
        (
            cause,
            f"{count:,}",
            *(f"{whats[cause][what]:,}" for what in ("prompt", "output", "logprobs")),
            _sentence(CAUSES[cause]),
        )
        for cause, count in c.causes.items()
    ]
    yield table(head, rows, numbers=(1, 2, 3, 4))
    if c.rescored and not c.flips:
        yield tag(
            "p", "No document's score changed, yet the reported results did: they were aggregated in another way."
        )
    if (change := c.logprobs) is not None and change.differing:
        rows = [
            ("nat", *(f"{value:.3g}" for value in (*change.percentiles.values(), change.max_abs))),
            ("float32 ulps", *(f"{value:,.0f}" for value in (*change.percentile_ulps.values(), change.max_ulps))),
        ]
        yield tag("p", "How far logprobs of equal tokens after equal tokens lie apart, where they differ:")
        yield table(("|Δ logprob|", *change.percentiles, "max"), rows, numbers=(1, 2, 3, 4))


def _sentence(text: str) -> Markup:
    """A cell of words, which a narrow screen must not press into a column of letters."""
    return tag("span", text, class_="words")


def _statistics(c: Comparison) -> Iterator[Markup]:
    pairs = [m.paired for m in c.metrics if m.paired is not None]
    reach = {nats: _reach(m.paired for m in c.metrics if m.paired and m.nats is nats) for nats in (False, True)}
    head = ("Metric", "A", "B", "B − A", "", "95 % interval", "Won / lost / equal", "p", "MDE")
    yield table(head, [_metric(c, m, reach[m.nats]) for m in c.metrics], numbers=(1, 2, 3, 5, 6, 7, 8))
    tests = sorted({TESTS[p.test] for p in pairs})
    yield tag("p", f"Won, lost, equal: {units(c.metrics)} on which B is better, worse and equal. "
                   f"p: two-sided, {' or '.join(tests) or 'no test'}. "
                   "MDE: the smallest true difference found 4 times in 5 at the 5 % level.", class_="note")  # fmt: skip
    yield from (tag("p", note, class_="note") for note in pairing_notes(c.metrics))


def _reach(pairs: Iterable[PairedResult]) -> float:
    """How far from 0 these intervals go: they share one scale."""
    ends = (abs(e) for p in pairs for e in (p.ci_low, p.ci_high, p.difference) if math.isfinite(e))
    return max(ends, default=0.0) or 1.0


def _metric(c: Comparison, metric: MetricDelta, reach: float) -> list[str | Markup | None]:
    task, name, filter_name = metric.key
    direction = {True: "up", False: "down", None: None}[metric.higher_is_better]
    values = [metric.value_a, metric.value_b]
    p = metric.paired
    if p is not None and c.partial:  # what is reported covers other documents
        values = [p.mean_a, p.mean_b]
    named = join(tag("span", name, class_=direction), tag("span", f"{task}, {filter_name}", class_="under"))
    first = [named, *("" if v is None else f"{v:.4f}" for v in values)]
    if p is None:
        delta = f"{values[1] - values[0]:+.4f}" if values[0] is not None and values[1] is not None else ""
        return [*first, delta, None, "", "", "", ""]
    drawn = None
    if math.isfinite(p.ci_low) and math.isfinite(p.ci_high):
        drawn = interval(p.difference, p.ci_low, p.ci_high, (-reach, reach), rule=0)
    between = f"{p.ci_low:+.4f} … {p.ci_high:+.4f}"
    counts = f"{p.wins:,} / {p.losses:,} / {p.ties:,}"
    return [
        *first,
        f"{p.difference:+.4f}",
        drawn,
        between,
        counts,
        f"{p.p_value:.3g}",
        f"{p.minimum_detectable_effect:.4f}",
    ]


def listed(lines: Sequence[str]) -> Markup:
    """Sentences as a list."""
    return tag("ul", *(tag("li", line) for line in lines), class_="plain")
