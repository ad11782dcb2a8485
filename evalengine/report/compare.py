"""Two runs side by side: a verdict, the items that differ, and what each difference comes from.

IDENTICAL: every request that both runs hold has the same digest leaf, and every score is the same. SAME TOKENS: the
outputs are equal, logprobs are not (or, in lm-eval's files, cannot be compared). DIFFERENT: outputs, answers or scores
differ. Runs of unlike inputs are compared on what they share; `comparability.incomparable` says whether that is wise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evalengine.report.comparability import (
    NUMERIC_SETTINGS,
    Finding,
    data_differs,
    differing,
    findings,
    short,
    unchecked,
)
from evalengine.report.divergence import Divergence, LogprobChange, divergence, logprob_change
from evalengine.report.flips import Cause, Flip, flips, same_number
from evalengine.report.runs import Item, Key, Run, ScoreKey, merkle_differences
from evalengine.report.statistics import PairedResult, paired

Verdict = Literal["IDENTICAL", "SAME TOKENS", "DIFFERENT"]
Level = Literal["bitwise", "tokens", "answers"]
LEVELS: tuple[Level, ...] = ("bitwise", "tokens", "answers")
# Of the manifest, outside the identity.
SURROUNDINGS = ("engine", "hardware", "libraries", "code", "python", "platform")


@dataclass(frozen=True)
class ItemDifference:
    """One request whose records differ."""

    key: Key
    what: Literal["prompt", "output", "logprobs"]  # the first of them that differs
    cause: Cause


@dataclass(frozen=True)
class MetricDelta:
    """One metric: as each run reports it over all its documents, and paired over the documents of both."""

    key: ScoreKey
    value_a: float | None
    value_b: float | None
    paired: PairedResult | None  # None where the runs hold no number by document
    left_out: int  # documents without a finite score in both, which no statistic can take


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything that `compare` found."""

    a: Run
    b: Run
    verdict: Verdict
    common: int  # requests in both
    only_a: int
    only_b: int
    findings: list[Finding]
    unchecked: list[str]
    differences: list[ItemDifference]
    logprobs: LogprobChange | None  # over the differing items
    divergences: list[Divergence]
    flips: list[Flip]
    metrics: list[MetricDelta]
    rescored: bool  # equal records, yet other aggregated results
    surroundings: list[str]  # machine, schedule and versions: outside the identity, and different

    @property
    def digests_equal(self) -> bool | None:
        """None if a run has no digest."""
        return self.a.digest == self.b.digest if self.a.digest and self.b.digest else None

    @property
    def causes(self) -> dict[str, int]:
        """How many items, and for the scorer documents, each cause accounts for."""
        counts = Counter(difference.cause for difference in self.differences)
        scored = {(flip.task, flip.doc_id) for flip in self.flips if flip.cause == "scorer"}
        counts.update({"scorer": max(len(scored), int(self.rescored))} if scored or self.rescored else {})
        return dict(sorted(counts.items()))

    def within(self, level: Level) -> bool:
        """Whether the runs agree at this level: every bit, every output token, or every answer and 0/1 score."""
        if level == "answers":
            return not self.flips and not self.rescored
        return self.verdict == "IDENTICAL" or (level == "tokens" and self.verdict == "SAME TOKENS")


def compare(a: Run, b: Run) -> Comparison:
    """The evidence on two runs, over the requests and documents that both hold."""
    found = findings(a, b)
    common = a.items.keys() & b.items.keys()
    elsewhere: Cause = "configuration" if any(f.subject == "configuration" for f in found) else "numerics"
    differences = [_difference(a, b, key, elsewhere) for key in _differing_keys(a, b) if key in common]
    flipped = list(flips(a, b, {d.key[:2]: d.cause for d in reversed(differences)}))
    rescored = _rescored(a, b, differences)
    pairs = [(a.items[d.key], b.items[d.key]) for d in differences if d.what != "prompt"]
    parted = (divergence(x, y, _greedy(a, x.task) and _greedy(b, y.task)) for x, y in pairs)
    return Comparison(
        a=a,
        b=b,
        verdict="DIFFERENT" if rescored else _verdict(a, b, differences, flipped),
        common=len(common),
        only_a=len(a.items) - len(common),
        only_b=len(b.items) - len(common),
        findings=found,
        unchecked=unchecked(a, b),
        differences=differences,
        logprobs=logprob_change(pairs),
        divergences=[d for d in parted if d is not None],
        flips=flipped,
        metrics=[_metric(a, b, key) for key in sorted(a.results.keys() | b.results.keys())],
        rescored=rescored,
        surroundings=list(_surroundings(a, b)),
    )


def _verdict(a: Run, b: Run, differences: list[ItemDifference], flipped: list[Flip]) -> Verdict:
    if flipped or any(d.what != "logprobs" for d in differences):
        return "DIFFERENT"
    bits = all(x.leaf and y.leaf for x, y in _pairs(a, b))
    return "IDENTICAL" if bits and not differences else "SAME TOKENS"


def _rescored(a: Run, b: Run, differences: list[ItemDifference]) -> bool:
    """Whether equal records of equal requests came out as other results: the scorer's or the aggregation's doing.

    Sums may be rounded in another order on another machine, hence the tolerance.
    """
    if differences or a.items.keys() != b.items.keys():
        return False
    pairs = [(a.results[key][0], b.results[key][0]) for key in a.results.keys() & b.results.keys()]
    return any(not same_number(x, y) and not math.isclose(x, y, rel_tol=1e-12) for x, y in pairs)


def _differing_keys(a: Run, b: Run) -> Iterator[Key]:
    """By Merkle descent where both runs have leaves; item by item where one has none."""
    if all(x.leaf and y.leaf for x, y in _pairs(a, b)):
        yield from merkle_differences(a, b)
    else:
        yield from (x.key for x, y in _pairs(a, b) if data_differs(a, b, x, y) or not _equal_as_far_as_known(x, y))


def _pairs(a: Run, b: Run) -> Iterator[tuple[Item, Item]]:
    return ((item, b.items[key]) for key, item in a.items.items() if key in b.items)


def _equal_as_far_as_known(x: Item, y: Item) -> bool:
    sums = x.sum_logprob is None or y.sum_logprob is None or same_number(x.sum_logprob, y.sum_logprob)
    return _same_output(x, y) and sums


def _same_output(x: Item, y: Item) -> bool:
    """By token ids where both runs have their hash, else by text; scored text is part of the request."""
    if x.output_sha256 and y.output_sha256:
        return x.output_sha256 == y.output_sha256
    return x.kind != "generate_until" or x.text is None or y.text is None or x.text == y.text


def _difference(a: Run, b: Run, key: Key, elsewhere: Cause) -> ItemDifference:
    """What differs first in a request that both runs hold, and why."""
    x, y = a.items[key], b.items[key]
    if data_differs(a, b, x, y):
        prompts = x.prompt_sha256 != y.prompt_sha256 if x.prompt_sha256 and y.prompt_sha256 else True
        return ItemDifference(key, "prompt" if prompts or _same_output(x, y) else "output", "data")
    return ItemDifference(key, "logprobs" if _same_output(x, y) else "output", elsewhere)


def _metric(a: Run, b: Run, key: ScoreKey) -> MetricDelta:
    """The metric's two values, and its paired statistics over the documents that both runs score by a number."""
    left, right = a.scores.get(key, {}), b.scores.get(key, {})
    docs = [d for d in sorted(left.keys() & right.keys()) if math.isfinite(left[d]) and math.isfinite(right[d])]
    result = None
    if len(docs) > 1:
        higher = a.higher_is_better.get(key, True)
        x, y = (np.array([scores[d] for d in docs], dtype=np.float64) for scores in (left, right))
        result = paired(x, y, higher_is_better=higher)
    values = [run.results.get(key, (None, None))[0] for run in (a, b)]
    return MetricDelta(key, values[0], values[1], result, len(left.keys() & right.keys()) - len(docs))


def _surroundings(a: Run, b: Run) -> Iterator[str]:
    if a.manifest and b.manifest:
        for name in SURROUNDINGS:
            for path, old, new in differing(a.manifest.get(name), b.manifest.get(name), (name,)):
                if path[:2] != ("engine", "stats") and path[-1] not in NUMERIC_SETTINGS:  # those are findings
                    yield f"{'.'.join(path)}: {short(old)} and {short(new)}"


def _greedy(run: Run, task: str) -> bool:
    settings = run.identity.get("tasks", {}).get(task) or {}
    return not (settings.get("generation") or {}).get("temperature")
