"""The divergence map, items by output tokens: where outputs part, and how far apart logprobs are before that; as data
for `assets/map.js`, a legend that says what a colour means, and a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.item_differences import changed_bits
from evalengine.report.html.differences import parting
from evalengine.report.html.markup import Markup, tag
from evalengine.report.html.page import Page
from evalengine.report.numbers import counted
from evalengine.report.read.names import item_name
from evalengine.report.read.run import Item, Key

LIMITS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # nat: |delta| below the first is level 1, from the last on level 7
NO_DISTANCE = 8  # the level of logprobs that differ where one of them is NaN or infinite
PARTS, AFTER = 9, 10  # states beside the levels of a `MapRow`: the first token that differs, and what follows it


@dataclass(frozen=True)
class MapRow:
    """One request of both runs, token by token."""

    key: Key
    tokens: int  # how many the longer output has
    parts_at: int | None  # the first token that differs; None if the outputs are equal
    first: int | None  # the first token that differs or whose logprob does; None if there is none
    # A digit for each token up to where the outputs part: 0 equal bits, 1 to 7 `LIMITS`, 8 no distance. Zeros at the
    # end are left out.
    levels: str


def divergence_map(c: Comparison) -> list[MapRow]:
    """A row for each request that both runs hold with its tokens, and whose prompts are equal, in key order."""
    changed = {difference.key for difference in c.differences}
    parted = {divergence.key: divergence.position for divergence in c.divergences}
    return list(_rows(c, changed, parted, c.other_prompts))


def _rows(
    c: Comparison, changed: Collection[Key], parted: Mapping[Key, int], left_out: Collection[Key]
) -> Iterator[MapRow]:
    for key, x in c.a.items.items():
        y = c.b.items.get(key)
        if y is None or x.output_ids is None or y.output_ids is None or key in left_out:
            continue
        at = parted.get(key)
        levels = _levels(x, y, len(x.output_ids) if at is None else at) if key in changed else ""
        begin = len(levels) - len(levels.lstrip("0"))
        first = begin if begin < len(levels) else at
        yield MapRow(key, max(len(x.output_ids), len(y.output_ids)), at, first, levels)


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
        places = {key: place for place, (key, _) in enumerate(parting(c))}
        page.data("map", [[item_name(r.key), r.tokens, r.parts_at, r.first, places.get(r.key)] for r in rows])
        page.blocks("map", [row.levels for row in rows])
        off = tag("p", "Scripts are off: the map needs them.", class_="note")
        note = " ".join([_summary(rows), *_left_out(c)])
        page.section("map", "Divergence map", _legend(rows), tag("div", off, data_map=True), note=note)
    elif c.verdict != "IDENTICAL" and (why := _no_map(c, rows)):
        page.section("map", "Divergence map", note=f"There is no map: {why}.")


def _no_map(c: Comparison, rows: Sequence[MapRow]) -> str:
    """Why there is no map; "" if all requests can be shown, none is left out, and all are equal to the bit."""
    other_prompts = len(c.other_prompts)
    if rows:
        equal = f"what was asked alike ({counted(len(rows), 'request')}) is equal to the bit"
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


def _left_out(c: Comparison) -> Iterator[str]:
    if count := len(c.other_prompts):
        yield f"{count:,} more {'requests have' if count > 1 else 'request has'} another prompt and no line here."


def _summary(rows: Sequence[MapRow]) -> str:
    parts = [row.parts_at for row in rows if row.parts_at is not None]
    moved = sum(row.parts_at is None and row.first is not None for row in rows)
    sentences = [f"A line an item, a column a token of its output ({len(rows):,} items)."]
    if len(parts) == 1:
        sentences.append(f"One output parts, at token {parts[0]:,}.")
    elif parts:
        sentences.append(
            f"{len(parts):,} outputs part, the first at token {min(parts):,}, half by token {median(parts):,g}."
        )
    sentences.append(f"Same tokens, other logprobs: {moved:,}. Equal to the bit: {len(rows) - len(parts) - moved:,}.")
    return " ".join(sentences)


def _legend(rows: Sequence[MapRow]) -> Markup:
    """The legend's swatches, whose colours the script reads."""
    limits = [f"{limit:g}" for limit in LIMITS]
    ranges = [f"below {limits[0]}", *(f"{a} to {b}" for a, b in pairwise(limits)), f"from {limits[-1]}"]
    levels = [_swatch(level, f"{text} nat") for level, text in enumerate(ranges, 1)]
    odd = any(str(NO_DISTANCE) in row.levels for row in rows)
    parts = any(row.parts_at is not None for row in rows)
    return tag(
        "p",
        tag("span", _swatch(0, "equal bits"), "equal bits"),
        tag("span", *levels, f"|Δ logprob| {limits[0]} … {limits[-1]} nat"),
        tag("span", _swatch(NO_DISTANCE, "not finite"), "not finite") if odd else None,
        tag("span", _swatch(PARTS, "the first token that differs"), "outputs part") if parts else None,
        tag("span", _swatch(AFTER, "after the parting"), "after that") if parts else None,
        class_="map-legend",
    )


def _swatch(state: int, text: str) -> Markup:
    return tag("i", data_state=state, title=text)
