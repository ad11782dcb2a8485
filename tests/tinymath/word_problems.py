"""Grade-school word problems, written by a seeded generator: the data of the bundled model and the task `arithmetic`.

A problem is a template filled with names, things and numbers. Half of the problems come from `TEMPLATES` (whole
stories); the other half are chains: a start, one to three changes of one quantity (as many as the difficulty's steps
allow) and an ending, joined at random. The rationale has one line and one calculation a step, then `#### answer`.

A template's text holds `{field}` (a name, a thing or a number) and `[one|other]` (one of them is drawn). Its numbers
are drawn as "a 2-9, b 3-20" until every step is a whole number from 2 up to the difficulty's limit. A step
"p = a * b: text" calculates p; `{=}` in its text becomes "4 * 12 = 48".

Every draw goes through `Random.random()`, the one method whose stream Python promises to keep for a seed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeVar

from tests.tinymath.story_templates import CHANGES, ENDINGS, NAMES, STARTS, TEMPLATES, THINGS, VESSELS, Template

TEST_ROWS, TEST_SEED = 200, 75_000_001
EXEMPLAR_ROWS, EXEMPLAR_SEED = 64, 75_000_002
CHAIN_SHARE = 0.5

T = TypeVar("T")
_ALTERNATIVES = re.compile(r"\[([^\]]*)\]")
_STEP = re.compile(r"(\w+) = (\w+) ([-+*/]) (\w+): (.*)")


@dataclass(frozen=True)
class Difficulty:
    """Bounds on one problem's arithmetic. Larger values make a model of a given size less accurate."""

    max_steps: int = 4  # calculations in one rationale
    max_value: int = 999  # the largest number that may stand in it
    max_factor: int = 12  # the smaller factor of a product, and the divisor of a division


@dataclass(frozen=True)
class Problem:
    """One word problem. `signature` names the template and its numbers; names, things and wording are not in it."""

    question: str
    rationale: str
    answer: int
    signature: str

    def row(self) -> dict[str, str]:
        """The dataset row: `answer` is the rationale, a line end and `#### N`."""
        return {"question": self.question, "answer": f"{self.rationale}\n#### {self.answer}"}


@dataclass(frozen=True)
class _Step:
    result: str
    left: str
    op: str
    right: str
    text: str


@dataclass(frozen=True)
class _Parsed:
    key: str
    text: str
    draws: tuple[tuple[str, int, int], ...]  # name, lowest, highest
    steps: tuple[_Step, ...]


def generate(rng: Random, difficulty: Difficulty = Difficulty()) -> Problem:
    """Draws one problem."""
    while True:
        parsed = _parse(_chain(rng) if rng.random() < CHAIN_SHARE else _pick(rng, TEMPLATES))
        if len(parsed.steps) <= difficulty.max_steps:
            return _fill(rng, parsed, _solve(rng, parsed, difficulty))


def held_out_split() -> list[Problem]:
    """The test split: TEST_ROWS problems with different signatures and questions, the same on every Python."""
    rng, excluded, rows = Random(TEST_SEED), set[str](), list[Problem]()
    while len(rows) < TEST_ROWS:
        problem = generate(rng)
        if excluded.isdisjoint(exclusion_hashes(problem)):
            excluded |= exclusion_hashes(problem)
            rows.append(problem)
    return rows


def training_stream(seed: int) -> Iterator[Problem]:
    """Endless problems for training; one that shares its signature or its question with the test split is dropped."""
    held_out = _held_out_hashes()
    rng = Random(seed)
    while True:
        problem = generate(rng)
        if held_out.isdisjoint(exclusion_hashes(problem)):
            yield problem


def exclusion_hashes(problem: Problem) -> set[str]:
    """SHA-256 of the signature and of the question: a training problem may share neither with the test split."""
    return {hashlib.sha256(text.encode()).hexdigest() for text in (problem.signature, problem.question)}


@cache
def _held_out_hashes() -> frozenset[str]:
    return frozenset(digest for problem in held_out_split() for digest in exclusion_hashes(problem))


def _below(rng: Random, n: int) -> int:
    return int(rng.random() * n)


def _pick(rng: Random, items: Sequence[T]) -> T:
    return items[_below(rng, len(items))]


def _chain(rng: Random) -> tuple[str, ...]:
    """Names a chain by its parts: a start, one to three changes (no two equal neighbours) and an ending."""
    parts = [_pick(rng, tuple(STARTS))]
    for _ in range(1 + _below(rng, 3)):
        parts.append(_pick(rng, [change for change in CHANGES if change != parts[-1]]))
    return (*parts, _pick(rng, tuple(ENDINGS)))


@cache
def _parse(source: Template | tuple[str, ...]) -> _Parsed:
    template = source if isinstance(source, Template) else _join(source)
    draws = []
    for item in template.draws.split(", "):
        name, bounds = item.split(" ")
        low, high = bounds.split("-")
        draws.append((name, int(low), int(high)))
    matches = [_STEP.fullmatch(step) for step in template.steps]
    assert all(matches), f"template {template.key}: a step is not 'p = a * b: text'"
    return _Parsed(template.key, template.text, tuple(draws), tuple(_Step(*m.groups()) for m in matches if m))


def _join(parts: tuple[str, ...]) -> Template:
    """One template from a chain's parts. In a part, k is its own number, v the quantity before it and w after it."""
    start = STARTS[parts[0]]
    texts, draws, steps = [start.text], [start.draws], list(start.steps)
    for index, key in enumerate(parts[1:]):
        part = CHANGES[key] if key in CHANGES else ENDINGS[key]
        texts.append(part.text.replace("{k}", f"{{k{index}}}"))
        if part.draws:
            draws.append(re.sub(r"\bk\b", f"k{index}", part.draws))
        names = {"k": f"k{index}", "v": f"v{index}", "w": f"v{index + 1}"}
        for step in part.steps:
            calculation, text = step.split(": ", 1)
            steps.append(re.sub(r"\b[kvw]\b", lambda m, n=names: n[m[0]], calculation) + ": " + text)  # type: ignore[misc]
    return Template("-".join(parts), " ".join(texts), ", ".join(draws), tuple(steps))


def _solve(rng: Random, parsed: _Parsed, difficulty: Difficulty) -> dict[str, int]:
    """Draws the numbers until every step holds; returns them with the steps' results."""
    for _ in range(100_000):
        values = {name: low + _below(rng, high - low + 1) for name, low, high in parsed.draws}
        if all(_calculate(values, step, difficulty) for step in parsed.steps):
            return values
    raise AssertionError(f"template {parsed.key}: no numbers satisfy it")


def _calculate(values: dict[str, int], step: _Step, difficulty: Difficulty) -> bool:
    """Stores the step's result; false if it is not a whole number within the limits."""
    left, right = _value(values, step.left), _value(values, step.right)
    if step.op == "/" and (left % right or right > difficulty.max_factor):
        return False
    unit = not (step.left in values and step.right in values)  # a unit's factor (60 minutes) is always allowed
    if step.op == "*" and not unit and min(left, right) > difficulty.max_factor:
        return False
    result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[step.op]
    values[step.result] = result
    return 2 <= result <= difficulty.max_value


def _value(values: dict[str, int], name: str) -> int:
    return int(name) if name.isdigit() else values[name]


def _fill(rng: Random, parsed: _Parsed, values: dict[str, int]) -> Problem:
    fields: dict[str, str | int] = dict(values)
    names = list(NAMES)
    for field in ("n", "m", "l"):
        fields[field] = names.pop(_below(rng, len(names)))
    things = list(THINGS)
    fields["o"] = things.pop(_below(rng, len(things)))
    fields["u"] = _pick(rng, things)
    fields["box"], fields["boxes"] = _pick(rng, VESSELS)

    def write(text: str) -> str:
        return _ALTERNATIVES.sub(lambda m: _pick(rng, m[1].split("|")), text).format_map(fields)

    question = write(parsed.text)
    lines = []
    for step in parsed.steps:
        left, right = _value(values, step.left), _value(values, step.right)
        lines.append(write(step.text.replace("{=}", f"{left} {step.op} {right} = {values[step.result]}")))
    numbers = ",".join(str(values[name]) for name, _, _ in parsed.draws)
    return Problem(question, "\n".join(lines), values[parsed.steps[-1].result], f"{parsed.key}:{numbers}")
