"""Traces of an item's re-runs, and the first op whose output differs between two of them.

    H numbers that an op puts out for one token.

A trace has a digest of every op's output at every token position, and some values. An output is digested as float32,
to which bfloat16 and float16 widen without loss: equal numbers have equal digests in runs of different dtypes, and
within one dtype equal digests mean equal bytes.

Tokens of two traces are aligned by position, so batches, chunks and prefix-cache hits may differ. Only positions at
which both sides had been fed the same tokens are compared: beyond them an op has different inputs. Where the outputs
diverge, the two logprobs are of different tokens, and are not compared either.

"First" is by depth, among the tokens up to the first one whose logprob differs: of all ops with a differing output
there, the one that runs first, at its first token. Whatever other ops feed into it is equal on both sides.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.records.schema import RecordKey
from evalengine.report.compare.item_differences import ulps
from evalengine.report.read.names import item_name
from evalengine.report.read.run import Run

DIGEST_BYTES = 8  # length of a BLAKE2b digest: two unlike outputs agree by chance once in 2^64 comparisons
LOGITS, LOGPROB = "lm_head", "logprob"  # the last two ops; the second is the engine's answer itself


@dataclass
class Computation:
    """One computation of one token position. A position is computed again after a preemption."""

    position: int
    step_requests: int = 0  # sequences of the step that computed it
    step_tokens: int = 0  # tokens of that step
    reused: bool = False  # another request computed it; the item found it in the prefix cache
    digests: dict[str, bytes] = field(default_factory=dict)  # op -> DIGEST_BYTES
    values: dict[str, np.ndarray] = field(default_factory=dict)  # op -> float32 [H]; empty without values

    def take(self, op: str, output: np.ndarray, keep: bool) -> None:
        """Adds an op's output, float32 [H]: its digest, and its values if `keep`."""
        self.digests[op] = hashlib.blake2b(output.tobytes(), digest_size=DIGEST_BYTES).digest()
        if keep:
            self.values[op] = output


@dataclass(frozen=True)
class Trace:
    """One side of an explanation."""

    label: str  # the run's name, and the settings it was given instead
    key: RecordKey
    prompt_sha256: str
    prompt_tokens: int
    token_ids: list[int]  # the prompt's and the output's
    ops: dict[str, str]  # op -> dtype of its output, in the order in which they run
    computations: list[Computation]  # by position, then by time
    settings: dict[str, Any]  # the engine's, as resolved; the seed; `weights`: their hash, which older files lack
    machine: dict[str, Any]  # hardware, libraries and code of the re-run
    extent: str  # what was run again
    reproduced: bool | None  # whether the re-run gave the bytes of the run's record; None: it is no run's configuration

    @property
    def fed_ids(self) -> list[int]:
        """The token at each position; the last one of the output is predicted, never fed."""
        return self.token_ids[:-1]


@dataclass(frozen=True)
class Side:
    """A run to repeat, and how."""

    run: Run
    instead: tuple[str, ...] = ()  # settings that this side has instead of the run's ("batch_invariant=false")
    places: tuple[str, ...] = ()  # where rows and weights lie here ("data_dir=/data"), and on which device to run
    alone: bool = False  # only the item, without the other requests of the run

    @property
    def label(self) -> str:
        return f"{self.run.name} with {' '.join(self.instead)}" if self.instead else self.run.name


def place(op: str) -> tuple[str, str]:
    """(layer, op) as a reader knows them: ("3", "mlp.down_proj"); a layer of "" lies outside all layers."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", op)
    return (match[1], match[2]) if match else ("", op.removeprefix("model."))


def op_name(op: str) -> str:
    """An op's place for a sentence: `layer 3, mlp.down_proj`."""
    layer, name = place(op)
    return f"layer {layer}, {name}" if layer else name


Pair = tuple[Computation, Computation]


@dataclass(frozen=True)
class Size:
    """How far two outputs of H numbers lie apart."""

    elements: int  # H
    differing: int  # elements whose bits differ
    max_abs: float  # over the elements that are finite in both
    max_relative: float  # max_abs over the largest finite magnitude in A's output
    max_ulps: int  # steps between neighbouring numbers of `unit`
    unit: str  # the outputs' dtype; float32 if they have two


@dataclass(frozen=True)
class OpDifference:
    """One op over all tokens up to `Explanation.until`."""

    op: str
    compared: int  # token positions, each as often as it was computed
    differing: int
    size: Size | None  # at token `until`; None: no output or no values of it there


@dataclass(frozen=True)
class First:
    """The first op whose output differs, and at which token."""

    op: str
    position: int
    a: Computation
    b: Computation
    size: Size | None  # None: the trace holds no values


@dataclass(frozen=True, eq=False)
class Explanation:
    """The result of `explain`."""

    a: Trace
    b: Trace
    common: int  # token positions that both were fed alike
    until: int  # the first token whose logprob (or, at equal logprobs, logits) differs; the last common one if none
    first: First | None  # None where every output is equal
    ops: list[OpDifference]  # in the order in which they run
    next_differs: bool  # whether different tokens follow the common ones

    @property
    def lacking(self) -> list[int]:
        """Positions whose values a trace must hold to give every size."""
        if self.first is None:
            return []
        reached = next((row for row in self.ops if row.op == LOGITS), None)
        no_growth = reached is not None and reached.size is None
        return sorted(
            {*([self.first.position] if self.first.size is None else []), *([self.until] if no_growth else [])}
        )


def explain(a: Trace, b: Trace) -> Explanation:
    """Compares two traces. Raises `ConfigError` if they are not of the same item, prompt and model."""
    _check(a, b)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.fed_ids, b.fed_ids, strict=False)))
    next_differs = a.token_ids[common : common + 1] != b.token_ids[common : common + 1]
    last = common - 1 if next_differs else None
    pairs = [_without_answers(pair) if pair[0].position == last else pair for pair in _pairs(a, b, common)]
    until = _until(pairs, common)
    pairs = [pair for pair in pairs if pair[0].position <= until]
    ops = [_difference(a, b, op, pairs, until) for op in a.ops]
    return Explanation(a, b, common, until, _first(a, b, pairs), ops, next_differs)


def check_prompts(key: RecordKey, a: str, b: str) -> None:
    """Checks that an item's prompts have equal hashes. Raises `ConfigError` if they do not."""
    if a != b:
        raise ConfigError(
            f"explain: the prompts of {item_name(key)} differ between A and B, so no op is to blame; `compare` shows "
            "what they were made of"
        )


def _check(a: Trace, b: Trace) -> None:
    if a.key != b.key:
        raise ConfigError(f"explain: A is {item_name(a.key)} and B {item_name(b.key)}; name the same --item for both")
    check_prompts(a.key, a.prompt_sha256, b.prompt_sha256)
    if list(a.ops) != list(b.ops):
        only = sorted(set(a.ops) ^ set(b.ops)) or ["their order"]
        raise ConfigError(f"explain: A and B are not the same model: {only[0]} is in one of them only")


def _pairs(a: Trace, b: Trace, common: int) -> Iterator[Pair]:
    """Both sides' computations of each token; if one side has more of them, the other's last one is paired again."""
    left, right = _by_position(a), _by_position(b)
    for position in range(common):
        x, y = left[position], right[position]
        for number in range(max(len(x), len(y))):
            yield x[min(number, len(x) - 1)], y[min(number, len(y) - 1)]


def _without_answers(pair: Pair) -> Pair:
    """The pair without its logprobs."""

    def without(side: Computation) -> Computation:
        digests = {op: digest for op, digest in side.digests.items() if op != LOGPROB}
        return replace(side, digests=digests, values={op: x for op, x in side.values.items() if op != LOGPROB})

    return without(pair[0]), without(pair[1])


def _by_position(trace: Trace) -> dict[int, list[Computation]]:
    computations: dict[int, list[Computation]] = {}
    for computation in trace.computations:
        computations.setdefault(computation.position, []).append(computation)
    return computations


def _until(pairs: list[Pair], common: int) -> int:
    for op in (LOGPROB, LOGITS):
        if (position := next((x.position for x, y in pairs if _differs(op, x, y)), None)) is not None:
            return position
    return common - 1


def _differs(op: str, x: Computation, y: Computation) -> bool:
    return op in x.digests and op in y.digests and x.digests[op] != y.digests[op]


def _first(a: Trace, b: Trace, pairs: list[Pair]) -> First | None:
    for op in a.ops:
        for x, y in pairs:
            if _differs(op, x, y):
                return First(op, x.position, x, y, _size(a, b, op, x, y))
    return None


def _difference(a: Trace, b: Trace, op: str, pairs: list[Pair], until: int) -> OpDifference:
    both = [(x, y) for x, y in pairs if op in x.digests and op in y.digests]
    sizes = [_size(a, b, op, x, y) for x, y in both if x.position == until]
    known_sizes = [size for size in sizes if size is not None]
    worst = max(known_sizes, key=lambda size: size.max_abs, default=None)
    return OpDifference(op, len(both), sum(_differs(op, x, y) for x, y in both), worst)


def _size(a: Trace, b: Trace, op: str, x: Computation, y: Computation) -> Size | None:
    if op not in x.values or op not in y.values:
        return None
    left, right = x.values[op], y.values[op]
    if left.shape != right.shape:
        raise ConfigError(f"explain: A and B are not the same model: {op} has {left.size} outputs and {right.size}")
    unit = a.ops[op] if a.ops[op] == b.ops[op] else "float32"
    return size_of(left, right, unit)


def size_of(a: np.ndarray, b: np.ndarray, unit: str) -> Size:
    """How far apart two outputs are. a, b: float32 [H] that hold numbers of dtype `unit`."""
    differing = int((a.view(np.int32) != b.view(np.int32)).sum())
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = a[finite], b[finite]
    largest = float(np.abs(x.astype(np.float64)).max(initial=0.0))
    delta = float(np.abs(x.astype(np.float64) - y).max(initial=0.0))
    relative = 0.0 if delta == 0 else delta / largest if largest else float("inf")
    return Size(a.size, differing, delta, relative, int(_steps(x, y, unit).max(initial=0)), unit)


def _steps(a: np.ndarray, b: np.ndarray, unit: str) -> np.ndarray:
    """ulps of `unit` between finite numbers that `unit` can hold, int64."""
    if unit == "bfloat16":  # float32's upper half, so its neighbours are 2^16 float32 steps apart
        return ulps(a, b) >> 16
    if unit == "float16":
        both = [values.astype(np.float16).view(np.int16).astype(np.int64) for values in (a, b)]
        ranks = [np.where(bits < 0, -(bits & 0x7FFF), bits) for bits in both]
        return np.abs(ranks[0] - ranks[1])
    return ulps(a, b)
