"""Two runs side by side as a page: verdict, comparability, attribution, divergence map, flips, statistics; and the
section of a noise floor, fast against invariant numerics on the same inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from evalengine.records.manifest_data import resumed_fast
from evalengine.report.compare import report as tables
from evalengine.report.compare.comparability import resumed_words
from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.headline import asked_for, changed_words, headline, parts_of_groups, scope
from evalengine.report.compare.item_differences import changed_bits
from evalengine.report.compare.matrix import distinguishing_settings, setting_words
from evalengine.report.html import parts
from evalengine.report.html.differences import diverging, flips_grid, outputs_grid, regressions_section
from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.numbers import counted, p_value, shown
from evalengine.report.read.groups import roots_of
from evalengine.report.read.names import item_name
from evalengine.report.read.run import Item, Key, Run

TILES = 3  # metrics shown large
FOLDED = "of the groups' own tasks, outside the family of tests"
LEVEL = 0.05  # a worse metric colours the verdict if its adjusted p-value is at most this
GOOD = {"IDENTICAL": True, "SAME TOKENS": None, "DIFFERENT": False}


def comparison_page(c: Comparison) -> Page:
    """A comparison as a page, the verdict first."""
    page = Page(title(c.a, "Two"), eyebrow="Comparison", scripts=("comparison.js", "map_picture.js", "map.js"))
    page.lead(parts.verdict(f"{headline(c)}.", f"{c.verdict}{scope(c)}: {tables.evidence(c)}.", _good(c)))
    page.lead(parts.tiles(_figures(c)), _runs(c))
    regressions_section(page, c)
    page.section("comparability", "Comparability", *_comparability(c))
    if c.causes:
        page.section("attribution", "Attribution", *_attribution(c))
    map_section(page, c)
    if c.flips:
        note = "Documents whose answer or score is another one in B; of given choices, under each metric."
        sheet = parts.sheet_table(tables.answers_sheet(c))
        page.section("flips", "Changed answers", sheet, flips_grid(page, c), note=note)
    if diverging(c):
        page.section("outputs", "Diverging outputs", outputs_grid(page, c), note=" ".join(tables.near_ties(c)) or None)
    if c.metrics:
        page.section("statistics", "Paired statistics", *_statistics(c))
    return page


def title(run: Run, count: str) -> str:
    """A page's title, `Two runs of gsm8k`; the tasks of one run stand for those of all."""
    tasks = roots_of(run.groups, [*dict.fromkeys(key[0] for key in run.results)]) or sorted({k[0] for k in run.items})
    return f"{count} runs of {', '.join(tasks) if len(tasks) <= 3 else f'{len(tasks)} tasks'}"


def _figures(c: Comparison) -> Iterator[tuple[str, str, str | None]]:
    yield from _first_metric(c)
    outside, of = c.only_a + c.only_b, f"of {c.common:,}"
    yield "Requests compared", f"{c.common:,}", f"{outside:,} only in one run" if outside else None
    for kind, basis in (("document", "of the requests"), ("prompt", "of the requests"), ("text", "of the same tokens")):
        if c.kinds[kind]:
            yield f"{kind.capitalize()}s that differ", f"{c.kinds[kind]:,}", basis
    yield "Requests whose bits differ", f"{len(c.differences):,}", of
    yield "Outputs that diverge", f"{c.outputs:,}", of
    yield "Documents that changed", f"{c.changed:,}", changed_words(c).partition(": ")[2] or f"of {c.documents:,}"
    differing, compared = c.logprob_counts
    if differing:
        unknown = c.logprobs.not_finite if c.logprobs else 0
        share = f"{parts.percent(differing / compared)} of {compared:,} logprobs differ"
        share += f"; {unknown:,} have no distance: NaN or infinite" if unknown else ""
        yield "Largest logprob change", c.largest, share


def _first_metric(c: Comparison) -> Iterator[tuple[str, str, str | None]]:
    """A tile for each of the first metrics that were requested: its values in A and B, and its p-value."""
    for metric in asked_for(c)[:TILES] if c.verdict == "DIFFERENT" else ():
        share = all(value is not None and 0 <= value <= 1 for value in metric.shown)
        values = ["" if v is None else shown(100 * v, ".1f") if share else shown(v, ".4g") for v in metric.shown]
        assert metric.paired is not None and metric.p_holm is not None, "as `asked_for` says"
        tests = sum(m.p_holm is not None for m in c.metrics)
        several = f", after Holm over {tests}: {p_value(metric.p_holm)}" if tests > 1 else ""
        below = f"p {p_value(metric.paired.p_value)}{several}"
        yield f"{' '.join(metric.key[:2])}{', %' if share else ''}", " → ".join(values), below


def _good(c: Comparison) -> bool | None:
    """Whether the verdict is good news: False where a metric got worse by more than chance explains, or no test is."""
    tests = [(m, m.p_holm) for m in c.metrics if m.paired is not None and m.p_holm is not None and not m.nats]
    if c.verdict != "DIFFERENT" or not tests:
        return GOOD[c.verdict]
    moved = [(m.difference or 0.0, m.higher_is_better) for m, p in tests if p <= LEVEL]
    return False if any(change and (change < 0) == (higher is not False) for change, higher in moved) else None


def _runs(c: Comparison) -> Node:
    names, values = distinguishing_settings([c.a, c.b])
    labels = [setting_words(names, row) for row in values]
    words = [label or run.source.name for label, run in zip(labels, (c.a, c.b), strict=True)]
    digests = [tag("code", run.digest or "no digest", class_="under") for run in (c.a, c.b)]
    origins = map(parts.origin_line, (c.a, c.b))
    return parts.facts(zip("AB", zip(words, digests, origins, strict=True), strict=True))


def _comparability(c: Comparison) -> Iterator[Node]:
    what = "documents, prompts, weights, tokenizer and generation settings"
    if not c.unlike:
        same = f"Nothing that both runs recorded of their {what} differs."
        yield tag("p", same if c.unchecked else f"The runs have the same requests and the same model: equal {what}.")
    named = {"Compared although they are unlike": c.unlike, "Settings that may change bits": c.settings}
    for name, lines in {**named, "Not known": c.unchecked}.items():
        if lines:
            yield [tag("p", f"{name}:"), parts.listed(lines)]
    if c.surroundings:
        yield parts.details(f"Also different around the runs ({len(c.surroundings)})", parts.listed(c.surroundings))


def _attribution(c: Comparison) -> Iterator[Node]:
    rows: list[list[Node]] = []
    for cause, count in c.causes.items():
        kinds: Counter[str] = Counter(kind for d in c.differences if d.cause == cause for kind in d.kinds)
        # A narrow screen must not press words into a column of letters.
        why = tag("span", "; ".join(c.why.get(cause, [])), class_="words")
        rows.append([cause, f"{count:,}", tables.differing_in(kinds), why])
    yield parts.table(("Cause", "Requests", "Differ", "What it means"), rows, (1,))
    if c.tensors:
        yield tag("p", "Weights that differ:")
        yield parts.listed(c.tensors)
    if c.rescored and not c.flips:
        yield tag("p", tables.AGGREGATED)
    yield from parts.lines_of(tables.logprob_lines(c.logprobs, ulps=True) if c.logprobs is not None else ())


def _statistics(c: Comparison) -> Iterator[Node]:
    inside = parts_of_groups(c)
    if outside := [m for m in c.metrics if m not in inside]:
        yield parts.sheet_table(tables.metrics_table(c, outside))
    if inside:
        table = parts.sheet_table(tables.metrics_table(c, inside))
        yield parts.details(f"{counted(len(inside), 'metric')} {FOLDED}", table)
    notes = (*tables.pairing_notes(c.metrics), *tables.cut_notes(c.metrics, c.a, c.b))
    yield from (tag("p", note, class_="note") for note in notes)


LIMITS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # nat: |delta| below the first is level 1, from the last on level 7
NO_DISTANCE = 8  # the level of logprobs that differ where one of them is NaN or infinite


@dataclass(frozen=True)
class MapRow:
    """One request of both runs, token by token."""

    key: Key
    tokens: int  # how many the longer output has
    parts_at: int | None  # the first token that differs; None if the outputs are equal
    first: int | None  # the first token that differs or whose logprob does; None if there is none
    # A digit for each token before the outputs diverge: 0 equal bits, 1 to 7 `LIMITS`, 8 no distance. Zeros at the
    # end are omitted.
    levels: str


def divergence_map(c: Comparison) -> list[MapRow]:
    """A row for each request that both runs hold with its tokens, and whose prompts are equal, in key order."""
    changed = {difference.key for difference in c.differences}
    diverged = {divergence.key: divergence.position for divergence in c.divergences}
    rows = []
    for key, x in c.a.items.items():
        y = c.b.items.get(key)
        if y is None or x.output_ids is None or y.output_ids is None or key in c.other_prompts:
            continue
        at = diverged.get(key)
        levels = _levels(x, y, len(x.output_ids) if at is None else at) if key in changed else ""
        begin = len(levels) - len(levels.lstrip("0"))
        first = begin if begin < len(levels) else at
        rows.append(MapRow(key, max(len(x.output_ids), len(y.output_ids)), at, first, levels))
    return rows


def _levels(x: Item, y: Item, shared: int) -> str:
    """`MapRow.levels` of the first `shared` tokens; "" if a run holds no logprobs."""
    if x.logprobs is None or y.logprobs is None:
        return ""
    a, b = (np.ascontiguousarray(logprobs[:shared], dtype=np.float32) for logprobs in (x.logprobs, y.logprobs))
    with np.errstate(invalid="ignore"):  # inf - inf is NaN
        delta = np.abs(a.astype(np.float64) - b)
    level = np.searchsorted(LIMITS, delta, side="right") + 1
    level[~np.isfinite(delta)] = NO_DISTANCE
    level[~changed_bits(a, b)] = 0
    return (level + ord("0")).astype(np.uint8).tobytes().decode("ascii").rstrip("0")


def map_section(page: Page, c: Comparison) -> None:
    """The map, or why there is none; nothing for runs that are equal to the bit."""
    rows = divergence_map(c)
    if any(row.first is not None for row in rows):
        places = {key: place for place, (key, _) in enumerate(diverging(c))}
        listed = [[item_name(r.key), r.tokens, r.parts_at, r.first, places.get(r.key)] for r in rows]
        page.data("map", {"rows": listed, "limits": LIMITS, "odd": any(str(NO_DISTANCE) in r.levels for r in rows)})
        page.blocks("map", [row.levels for row in rows])
        page.section("map", "Divergence map", tag("div", data_map=True), note=_summary(c, rows))
    elif c.verdict != "IDENTICAL" and (why := _no_map(c, rows)):
        page.section("map", "Divergence map", note=f"There is no map: {why}.")


def _no_map(c: Comparison, rows: Sequence[MapRow]) -> str:
    """Why there is no map; "" if all requests can be shown, none is left out, and all are equal to the bit."""
    other_prompts = len(c.other_prompts)
    if rows:
        equal = f"the answers to {counted(len(rows), 'request')} with equal prompts are equal bit for bit"
        others = f"{counted(other_prompts, 'request')} {'have' if other_prompts > 1 else 'has'} other prompts"
        return f"{equal}, and {others}" if other_prompts else ""
    lacking = [
        label
        for label, run in (("A", c.a), ("B", c.b))
        if all(item.output_ids is None for key, item in run.items.items() if key in c.a.items and key in c.b.items)
    ]
    if lacking:
        return f"it needs the tokens of both runs, and {' and '.join(lacking)} hold{'s' * (len(lacking) == 1)} none"
    return f"the prompts of all {other_prompts:,} requests differ, so that their tokens do not stand side by side"


def _summary(c: Comparison, rows: Sequence[MapRow]) -> str:
    parts = [row.parts_at for row in rows if row.parts_at is not None]
    moved = sum(row.parts_at is None and row.first is not None for row in rows)
    sentences = [f"A line an item, a column a token of its output ({len(rows):,} items)."]
    if len(parts) == 1:
        sentences.append(f"One output diverges, at token {parts[0]:,}.")
    elif parts:
        sentences.append(
            f"{len(parts):,} outputs diverge, the first at token {min(parts):,}, half by token {median(parts):,g}."
        )
    sentences.append(f"Same tokens, other logprobs: {moved:,}. Equal to the bit: {len(rows) - len(parts) - moved:,}.")
    if count := len(c.other_prompts):
        have = "requests have" if count > 1 else "request has"
        sentences.append(f"{count:,} more {have} another prompt and no line here.")
    return " ".join(sentences)


def noise_floor(a: Run, b: Run) -> Comparison:
    """How far the arithmetic alone moves a result: the runs of a pair (`sibling_runs.is_pair`), in either order."""
    return compare(b, a) if a.manifest.numerics == "fast" else compare(a, b)


def noise_floor_section(page: Page, floor: Comparison) -> None:
    """The figures and statistics of two runs in both kinds of numerics, and their times. floor: as `noise_floor` gives
    it."""
    sources = []
    for side, run in (("A", floor.a), ("B", floor.b)):
        resumed = " (resumed)" if run.manifest.counts.resumed_requests else ""
        took = f"{run.manifest.timings.run_seconds:,.1f} s{resumed}"
        sources.append((f"{side}: {run.manifest.numerics}, {took}", tag("code", run.source.name)))
    note = (
        "The same inputs under both kinds of arithmetic. A difference between two fast runs that is no larger than "
        "this says nothing about the model."
    )
    if count := resumed_fast(floor.b.manifest):
        note += f" The fast run {resumed_words(floor.b, count)}."
    title = "Noise floor: fast against invariant"
    page.section("noise", title, parts.tiles(_figures(floor)), *_statistics(floor), parts.facts(sources), note=note)
