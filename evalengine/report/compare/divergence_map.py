"""The divergence map, items by output tokens: where outputs part, and how far apart logprobs are before that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.divergence import changed_bits
from evalengine.report.read.run import Item, Key

LIMITS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # nat: |delta| below the first is level 1, from the last on level 7
NO_DISTANCE = 8  # the level of logprobs that differ where one of them is NaN or infinite


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
