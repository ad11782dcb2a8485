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

from evalengine.report.comparability import (
    NUMERIC_SETTINGS,
    Finding,
    data_differs,
    differing,
    findings,
    short,
)
from evalengine.report.divergence import Divergence, LogprobChange, divergence, logprob_change
from evalengine.report.flips import Cause, Flip, flips
from evalengine.report.metric_deltas import MetricDelta, metric_deltas
from evalengine.report.numbers import same_number
from evalengine.report.rolling import aligned
from evalengine.report.runs import Item, Key, Run, merkle_differences
from evalengine.report.unchecked import unchecked

Verdict = Literal["IDENTICAL", "SAME TOKENS", "DIFFERENT"]
Level = Literal["bitwise", "tokens", "answers"]
LEVELS: tuple[Level, ...] = ("bitwise", "tokens", "answers")
# Of the manifest, outside the identity.
SURROUNDINGS = ("engine", "hardware", "libraries", "code", "python", "platform")
SUMS = 1e-15  # relative: as far apart as rounding puts equal sums of sums (a baseline's windows, `rolling`)


@dataclass(frozen=True)
class ItemDifference:
    """One request whose records differ."""

    key: Key
    what: Literal["prompt", "output", "logprobs"]  # the first of them that differs
    cause: Cause


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
    rescored: bool  # other aggregated results, of outputs or scores that are equal
    surroundings: list[str]  # machine, schedule and versions: outside the identity, and different

    @property
    def partial(self) -> bool:
        """Whether a run holds requests that the other lacks, which were left out."""
        return bool(self.only_a or self.only_b)

    @property
    def larger(self) -> int:
        """How many requests the larger run holds."""
        return self.common + max(self.only_a, self.only_b)

    @property
    def unlike(self) -> list[str]:
        """What makes the runs incomparable: they were compared all the same."""
        return [finding.text for finding in self.findings if finding.refused]

    @property
    def settings(self) -> list[str]:
        """What may change bits between comparable runs."""
        return [finding.text for finding in self.findings if not finding.refused]

    @property
    def digests_equal(self) -> bool | None:
        """None if a run has no digest."""
        return self.a.digest == self.b.digest if self.a.digest and self.b.digest else None

    @property
    def causes(self) -> dict[str, int]:
        """How many items, and for the scorer documents, each cause accounts for."""
        counts = Counter(difference.cause for difference in self.differences)
        for cause in ("scorer", "unknown"):
            scored = {(flip.task, flip.doc_id) for flip in self.flips if flip.cause == cause}
            counts[cause] = max(len(scored), int(self.rescored and cause == "scorer"))
        return {cause: count for cause, count in sorted(counts.items()) if count}

    def within(self, level: Level) -> bool:
        """Whether the runs agree at this level: every bit, every output token, or every answer and 0/1 score."""
        if level == "answers":
            return not self.flips and not self.rescored
        return self.verdict == "IDENTICAL" or (level == "tokens" and self.verdict == "SAME TOKENS")


def compare(a: Run, b: Run) -> Comparison:
    """The evidence on two runs, over the requests and documents that both hold."""
    a, b = aligned(a, b)
    found = findings(a, b)
    common = a.items.keys() & b.items.keys()
    elsewhere: Cause = "configuration" if any(f.subject == "configuration" for f in found) else "numerics"
    differences = [_difference(a, b, key, elsewhere) for key in _differing_keys(a, b) if key in common]
    moved = _moved(a, b, differences)
    flipped = list(flips(a, b, moved))
    rescored = _rescored(a, b, {task for task, _ in moved})
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
        metrics=metric_deltas(a, b),
        rescored=rescored,
        surroundings=list(_surroundings(a, b)),
    )


def _verdict(a: Run, b: Run, differences: list[ItemDifference], flipped: list[Flip]) -> Verdict:
    if flipped or any(d.what != "logprobs" for d in differences):
        return "DIFFERENT"
    bits = all(x.leaf and y.leaf for x, y in _pairs(a, b))
    return "IDENTICAL" if bits and not differences else "SAME TOKENS"


def _moved(a: Run, b: Run, differences: list[ItemDifference]) -> dict[tuple[str, int], Cause]:
    """Documents whose answer may be another one for what the requests gave, and why.

    Logprobs make the answer where given texts are scored. A generated answer is made of its tokens alone: where those
    are equal, whoever scored them is left.
    """
    why = [d for d in differences if d.what != "logprobs" or a.items[d.key].kind != "generate_until"]
    moved: dict[tuple[str, int], Cause] = {d.key[:2]: d.cause for d in reversed(why)}
    for x, y in _pairs(a, b):
        if not _outputs_known(x, y):
            moved.setdefault((x.task, x.doc_id), "unknown")
    return moved


def _rescored(a: Run, b: Run, moved: set[str]) -> bool:
    """Whether results differ that the same outputs gave: the scorer's or the aggregation's doing.

    moved: tasks with other outputs. Results of no single task, such as a group's, are made of all of them. Sums may be
    rounded in another order on another machine, hence the tolerance.
    """
    tasks = {key[0] for key in a.items} | {key[0] for key in b.items}
    moved = moved | {key[0] for key in a.items.keys() ^ b.items.keys()}
    keys = [k for k in a.results.keys() & b.results.keys() if k[0] not in moved and (k[0] in tasks or not moved)]
    pairs = [(a.results[key][0], b.results[key][0]) for key in keys]
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
    if x.sum_logprob is None or y.sum_logprob is None or same_number(x.sum_logprob, y.sum_logprob):
        return _same_output(x, y)
    return _same_output(x, y) and math.isclose(x.sum_logprob, y.sum_logprob, rel_tol=SUMS)


def _same_output(x: Item, y: Item) -> bool:
    """By token ids where both runs have their hash, else by text; scored text is part of the request."""
    if x.output_sha256 and y.output_sha256:
        return x.output_sha256 == y.output_sha256
    return x.kind != "generate_until" or x.text is None or y.text is None or x.text == y.text


def _outputs_known(x: Item, y: Item) -> bool:
    """Whether `_same_output` has anything to go by."""
    hashes = bool(x.output_sha256 and y.output_sha256)
    return hashes or x.kind != "generate_until" or (x.text is not None and y.text is not None)


def _difference(a: Run, b: Run, key: Key, elsewhere: Cause) -> ItemDifference:
    """What differs first in a request that both runs hold, and why."""
    x, y = a.items[key], b.items[key]
    if data_differs(a, b, x, y):
        prompts = x.prompt_sha256 != y.prompt_sha256 if x.prompt_sha256 and y.prompt_sha256 else True
        return ItemDifference(key, "prompt" if prompts or _same_output(x, y) else "output", "data")
    return ItemDifference(key, "logprobs" if _same_output(x, y) else "output", elsewhere)


def _surroundings(a: Run, b: Run) -> Iterator[str]:
    if a.manifest and b.manifest:
        for name in SURROUNDINGS:
            for path, old, new in differing(a.manifest.get(name), b.manifest.get(name), (name,)):
                if path[:2] != ("engine", "stats") and path[-1] not in NUMERIC_SETTINGS:  # those are findings
                    yield f"{'.'.join(path)}: {short(old)} and {short(new)}"


def _greedy(run: Run, task: str) -> bool:
    settings = run.identity.get("tasks", {}).get(task) or {}
    return not (settings.get("generation") or {}).get("temperature")
