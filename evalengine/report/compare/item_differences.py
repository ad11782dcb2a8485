"""The requests whose records differ between two runs, each with every kind of difference: where outputs diverge, how
far apart logprobs are. And the documents that two runs answered or scored differently.

An answer is the filtered text, or the choice that a metric took (`choices_of`), whether right or wrong. Where another
wrong choice wins, the answer changes and the score does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.compare.comparability import SCORER, Attribution, document_change, prompt_differs
from evalengine.report.numbers import same_number, same_value
from evalengine.report.read.run import Item, Key, Run, ScoreKey, direction

NEAR_TIE = 0.05  # nat: candidates whose logprobs lie no further apart than this are nearly as likely as each other
TIE_CEILING = -math.log1p(math.exp(-NEAR_TIE))  # -0.668 nat: the logprob that neither of two such candidates exceeds
TOKENS_SHOWN = 8  # tokens of either continuation, from the first that differs
TEXT_BEFORE, TEXT_AFTER = 24, 40  # characters shown around the place where the texts part
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Divergence:
    """The first differing token of two outputs of one prompt. Lists start at it; None: not held by a run."""

    key: Key
    position: int  # in the output, from 0; the shorter output's length where it is the other's beginning
    tokens_a: list[int]
    tokens_b: list[int]
    logprob_a: float | None  # A's logprob of tokens_a[0]
    logprob_b: float | None  # B's logprob of tokens_b[0]
    gap: float | None  # logprob_a - logprob_b, nat
    near_tie: bool | None  # whether it may have been a near-tie; None: not judged (`divergence`)
    before: str  # the end of the text common to both
    text_a: str
    text_b: str


@dataclass(frozen=True)
class LogprobChange:
    """How logprobs of equal tokens after equal tokens differ, bit by bit; NaN equals NaN. Percentiles are over those
    that differ and have a distance."""

    compared: int
    differing: int
    not_finite: int  # differing pairs without a distance, as one logprob is NaN or infinite
    max_abs: float  # nat, of those that have a distance
    percentiles: dict[str, float]  # "p50" -> |delta|, nat
    max_ulps: int  # float32 values between the two
    percentile_ulps: dict[str, float]

    @property
    def measured(self) -> int:
        """How many of those that differ have a distance."""
        return self.differing - self.not_finite

    @property
    def largest(self) -> str:
        """The largest change for people, `0.1 nat`, and how many changes have no distance."""
        if not self.not_finite:
            return f"{self.max_abs:.3g} nat"
        odd = f"NaN or infinite in {self.not_finite:,}"
        return f"{odd}, else {self.max_abs:.3g} nat" if self.measured else odd


def divergence(x: Item, y: Item, greedy: bool) -> Divergence | None:
    """The first differing token of two requests; None if the outputs are equal or a run holds no tokens.

    greedy: both runs took the likeliest token, after the same prompt. Otherwise, and where an output ends, no near-tie
    is judged.

    Whether that was a near-tie, two candidates within e = NEAR_TIE of each other, needs the runner-up's logprob, which
    no record holds. The chosen tokens' logprobs p = log P(a) in A and q = log P(b) in B tell when it was no near-tie.
    Two candidates of one distribution have P(a) + P(b) <= 1; if log P(b) >= log P(a) - e, then
    P(a) (1 + exp(-e)) <= 1, so that p <= log(1 / (1 + exp(-e))) = TIE_CEILING, and in B likewise for q: a token that is
    likelier has no rival that near. And if no logprob moved by more than e between the runs, the likeliest of A lies
    within e of the likeliest of B: |p - q| <= e. So a near-tie is possible only if p and q are both at most TIE_CEILING
    and no further apart than e. That it was one does not follow.
    """
    if x.output_ids is None or y.output_ids is None or x.output_ids == y.output_ids:
        return None
    at = shared_tokens(x, y)
    logprobs = [None if i.logprobs is None or at >= len(i.logprobs) else float(i.logprobs[at]) for i in (x, y)]
    left, right = logprobs
    gap = left - right if left is not None and right is not None and math.isfinite(left - right) else None
    possible = left is not None and right is not None and max(left, right) <= TIE_CEILING
    text_a, text_b = x.text or "", y.text or ""
    place = shared_text(text_a, text_b)
    return Divergence(
        key=x.key,
        position=at,
        tokens_a=list(x.output_ids[at : at + TOKENS_SHOWN]),
        tokens_b=list(y.output_ids[at : at + TOKENS_SHOWN]),
        logprob_a=left,
        logprob_b=right,
        gap=gap,
        near_tie=possible and abs(gap) <= NEAR_TIE if gap is not None and greedy else None,
        before=text_a[max(0, place - TEXT_BEFORE) : place],
        text_a=text_a[place : place + TEXT_AFTER],
        text_b=text_b[place : place + TEXT_AFTER],
    )


def shared_tokens(x: Item, y: Item) -> int:
    """How many tokens both outputs begin with; 0 if a run holds none."""
    pairs = zip(x.output_ids or (), y.output_ids or (), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def shared_text(a: str, b: str) -> int:
    """How many characters both texts begin with."""
    at, end = 0, min(len(a), len(b))
    while at < end:  # a[:at] == b[:at]; slices compare far quicker than characters one by one
        middle = (at + end + 1) // 2
        at, end = (middle, end) if a[at:middle] == b[at:middle] else (at, middle - 1)
    return at


def logprob_change(pairs: Iterable[tuple[Item, Item]]) -> LogprobChange | None:
    """How the logprobs of two runs differ, over the tokens that each pair of outputs begins with alike.

    None if no pair holds logprobs on both sides.
    """
    left, right = [], []
    for x, y in pairs:
        if x.logprobs is not None and y.logprobs is not None:
            shared = shared_tokens(x, y)
            left.append(np.asarray(x.logprobs[:shared], dtype=np.float32))
            right.append(np.asarray(y.logprobs[:shared], dtype=np.float32))
    if not left:
        return None
    a, b = np.concatenate(left), np.concatenate(right)
    changed = changed_bits(a, b)
    a, b = a[changed], b[changed]
    finite = np.isfinite(a) & np.isfinite(b)
    delta = np.abs(a[finite].astype(np.float64) - b[finite])
    steps = ulps(a[finite], b[finite])
    return LogprobChange(
        compared=len(changed),
        differing=len(a),
        not_finite=int((~finite).sum()),
        max_abs=float(delta.max(initial=0.0)),
        percentiles=_percentiles(delta),
        max_ulps=int(steps.max(initial=0)),
        percentile_ulps=_percentiles(steps),
    )


def changed_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two float32 arrays of one shape differ in their bits, bool; NaN equals NaN, whatever its bits."""
    unlike: np.ndarray = a.view(np.int32) != b.view(np.int32)
    return unlike & ~(np.isnan(a) & np.isnan(b))


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many float32 values apart two arrays are, int64. a, b: finite float32 of one shape. 0.0 and -0.0 are 0 apart.

    Floats of one sign are ordered as their bits are (IEEE 754-2019, 3.4); negative ones count downwards from zero.
    """
    return np.abs(_rank(a) - _rank(b))


def _rank(values: np.ndarray) -> np.ndarray:
    """Each float32's place in the order of all float32 values, from 0 at zero, int64."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _percentiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {f"p{q}": 0.0 for q in PERCENTILES}
    return {f"p{q}": float(v) for q, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


Kind = Literal["document", "prompt", "output", "logprobs", "text"]
KINDS: tuple[Kind, ...] = ("document", "prompt", "output", "logprobs", "text")
SUMS = 1e-15  # relative tolerance: rounding may part equal sums of sums by this (a baseline's windows, `rolling`)


@dataclass(frozen=True)
class ItemDifference:
    """One request whose records differ."""

    key: Key
    # What differs. document: the content or target. output: the tokens, or the text where a run holds no tokens.
    # logprobs: bits, at the tokens that both outputs begin with. text: the text of equal tokens.
    kinds: tuple[Kind, ...]
    cause: str


def item_differences(a: Run, b: Run, blame: Attribution) -> list[ItemDifference]:
    """Every request of both runs that differs, in key order: by leaves where both runs have them, else by everything
    that both hold. A leaf does not hold the text, which is compared separately."""
    both = sorted(pairs(a, b), key=lambda pair: pair[0].key)
    leaves = all(x.leaf and y.leaf for x, y in both)
    changed = []
    for x, y in both:
        if leaves and x.leaf == y.leaf and not _other_text(x, y):
            continue
        if kinds := tuple(_kinds(a, b, x, y)) or (("logprobs",) if leaves else ()):  # only the leaves differ
            computed = bool({"output", "logprobs", "text"} & {*kinds})
            changed.append(ItemDifference(x.key, kinds, blame.of(x, y, computed)))
    return changed


def differing_leaves(a: Run, b: Run) -> list[Key]:
    """The requests whose digest leaves differ, or that one run lacks, in key order. Equal digests end it at once.

    Both runs need leaves: lm-eval's have none (`Run.digest` is None), for which this raises `ConfigError`.
    """
    for run in (a, b):
        if run.digest is None or any(not item.leaf for item in run.items.values()):
            raise ConfigError(f"{run.source}: it holds no digests (kind {run.kind}); compare its texts and scores")
    if a.digest == b.digest:
        return []
    left, right = ({key: item.leaf for key, item in run.items.items()} for run in (a, b))
    return [key for key in sorted({*left, *right}) if left.get(key) != right.get(key)]


def pairs(a: Run, b: Run) -> Iterator[tuple[Item, Item]]:
    """Each request that both runs hold, as it is in either."""
    return ((item, b.items[key]) for key, item in a.items.items() if key in b.items)


def outputs_known(x: Item, y: Item) -> bool:
    """Whether the runs hold enough to tell if two outputs are equal."""
    hashes = bool(x.output_sha256 and y.output_sha256)
    return hashes or x.kind != "generate_until" or (x.text is not None and y.text is not None)


def _kinds(a: Run, b: Run, x: Item, y: Item) -> Iterator[Kind]:
    """How one request's records differ. Outputs: by the hash of token ids where both have it, else by text; scored text
    is input. Logprobs: bit by bit where both have them, else by their sum."""
    tokens = bool(x.output_sha256 and y.output_sha256)
    same = x.output_sha256 == y.output_sha256 if tokens else not _other_text(x, y)
    if document_change(a, b, x.task, x.doc_id) in ("documents", "targets"):
        yield "document"
    if prompt_differs(a, b, x, y):
        yield "prompt"
    if not same:
        yield "output"
    if x.logprobs is not None and y.logprobs is not None:
        shared = shared_tokens(x, y)
        left, right = (np.asarray(values[:shared], dtype=np.float32) for values in (x.logprobs, y.logprobs))
        moved = bool(changed_bits(left, right).any())
    else:
        old, new = x.sum_logprob, y.sum_logprob
        moved = same and old is not None and new is not None and not same_value(old, new, SUMS)
    if moved:
        yield "logprobs"
    if tokens and same and _other_text(x, y):
        yield "text"


def _other_text(x: Item, y: Item) -> bool:
    return x.kind == "generate_until" and x.text is not None and y.text is not None and x.text != y.text


Change = Literal["right to wrong", "wrong to right", "score", "wrong to wrong", "right to right", "answer"]
CHANGES: dict[Change, str] = {  # changes of the score first; a document with several changes counts under the first
    "right to wrong": "from right to wrong",
    "wrong to right": "from wrong to right",
    "score": "by another score than from 0 to 1 or back",
    "wrong to wrong": "from one wrong answer to another",
    "right to right": "from one right answer to another",
    "answer": "at an equal score",
}
OF_ANSWER: tuple[Change, ...] = ("wrong to wrong", "right to right", "answer")  # the score did not change


@dataclass(frozen=True)
class Flip:
    """One document whose answer or score differs under one filter; for choices, under one filter and metric."""

    task: str
    filter: str
    doc_id: int
    metric: str | None  # the metric of the values below: the first that differs, else the first
    answer_a: str | None
    answer_b: str | None
    value_a: float | None
    value_b: float | None
    cause: str
    change: Change
    choice_a: int | None = None  # number of the choice taken, from 0; None: a generated text, or not known
    choice_b: int | None = None


def flips(a: Run, b: Run, causes: Mapping[tuple[str, int], str]) -> Iterator[Flip]:
    """Documents whose answer or 0/1 score differs. causes: for documents whose outputs differ or are not known; the
    cause for the others is `SCORER`.

    A log-likelihood that serves as a score is no answer: its noise is that of the logprobs.
    """
    generated = {item.task for item in a.items.values() if item.kind == "generate_until"}
    shared = (a.scores.keys() & b.scores.keys()) | (a.choices.keys() & b.choices.keys())
    places = {(key[0], key[2]) for key in shared} | (a.answers.keys() & b.answers.keys())
    for task, name in sorted(places):
        keys = sorted(key for key in shared if (key[0], key[2]) == (task, name))
        for own in [keys] if task in generated else [[key] for key in keys]:
            yield from _flips_of(a, b, (task, name), own, task in generated, causes)


def _flips_of(
    a: Run, b: Run, place: tuple[str, str], keys: list[ScoreKey], texts: bool, causes: Mapping[tuple[str, int], str]
) -> Iterator[Flip]:
    """Flips under these metrics of one filter: of a generated text, which all of them share, or of the choice of a
    single one. Where a choice is not known, the 0/1 score decides."""
    (said_a, taken_a), (said_b, taken_b) = (
        (run.answers.get(place, {}), {}) if texts else ({}, run.choices.get(keys[0], {})) for run in (a, b)
    )
    both = (said_a.keys() & said_b.keys()) | (taken_a.keys() & taken_b.keys())
    scored = (a.scores.get(key, {}).keys() & b.scores.get(key, {}).keys() for key in keys)
    for doc in sorted(both.union(*scored)):
        values = [(key, a.scores.get(key, {}).get(doc), b.scores.get(key, {}).get(doc)) for key in keys]
        changed = [(k, x, y) for k, x, y in values if x is not None and y is not None and not same_number(x, y)]
        if not texts:
            changed = [one for one in changed if {*one[1:]} == {0.0, 1.0}]
        choices = taken_a.get(doc), taken_b.get(doc)
        if changed or (doc in both and (said_a.get(doc) != said_b.get(doc) or choices[0] != choices[1])):
            key, old, new = [*changed, *values, (None, None, None)][0]
            answers = said_a.get(doc), said_b.get(doc)
            if key and not texts:
                answers = answer_of(a, key, doc), answer_of(b, key, doc)
            yield Flip(
                *(place[0], place[1], doc, key[1] if key else None, answers[0], answers[1], old, new),
                cause=causes.get((place[0], doc), SCORER),
                change=_change(old, new, direction((a, b), key) if key else None),
                choice_a=choices[0],
                choice_b=choices[1],
            )


def tally(flips: Iterable[Flip]) -> dict[ScoreKey, dict[Change, int]]:
    """How many documents changed in which way, by (task, metric, filter)."""
    counts: dict[ScoreKey, Counter[Change]] = {}
    for flip in flips:
        counts.setdefault((flip.task, flip.metric or "", flip.filter), Counter())[flip.change] += 1
    return {key: {change: count[change] for change in CHANGES if count[change]} for key, count in counts.items()}


def changed_documents(flips: Iterable[Flip]) -> dict[Change, int]:
    """How many documents changed in which way, each counted once: a changed score before a changed answer."""
    order = list(CHANGES)
    first: dict[tuple[str, int], Change] = {}
    for flip in flips:
        place = (flip.task, flip.doc_id)
        first[place] = min(flip.change, first.get(place, flip.change), key=order.index)
    counts = Counter(first.values())
    return {change: counts[change] for change in CHANGES if counts[change]}


def score_unchanged(flips: Iterable[Flip]) -> str:
    """How many documents changed their answer alone, `3 from one wrong answer to another`; "" if there are none."""
    counts = changed_documents(flips)
    return ", ".join(f"{counts[change]:,} {CHANGES[change]}" for change in OF_ANSWER if change in counts)


def changed_answers(a: Run, b: Run, key: ScoreKey, documents: Iterable[tuple[int, int]]) -> int | None:
    """How many documents (their numbers in A and in B) have another answer under a metric, right or wrong; None where a
    run does not hold its answers."""
    pairs = [(answer_of(a, key, x), answer_of(b, key, y)) for x, y in documents]
    known = [(old, new) for old, new in pairs if old is not None and new is not None]
    return sum(old != new for old, new in known) if known else None


def answer_of(run: Run, key: ScoreKey, doc: int) -> str | None:
    """A document's answer under a metric, for people: the filtered text, or the number of the choice that this metric
    took, with its text where the source has it. None where the source does not tell."""
    task, metric, name = key
    choice, likeliest = run.choices.get(key, {}).get(doc), run.answers.get((task, name), {}).get(doc)
    if choice is None:
        return None if metric in ("acc_norm", "acc_bytes", "acc_mutual_info") else likeliest
    texts = run.choice_texts.get(task, {}).get(doc, ())
    if choice < len(texts):
        return f"{choice}: {texts[choice].strip()}"
    return likeliest if likeliest is not None and likeliest.startswith(f"{choice}: ") else str(choice)


def _change(old: float | None, new: float | None, higher_is_better: bool | None) -> Change:
    if old is None or new is None:
        return "answer"
    if higher_is_better is None or not {old, new} <= {0.0, 1.0}:
        return "answer" if same_number(old, new) else "score"
    was, now = ((value == 1.0) == higher_is_better for value in (old, new))
    if was:
        return "right to right" if now else "right to wrong"
    return "wrong to right" if now else "wrong to wrong"
