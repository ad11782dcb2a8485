"""Sums, comparisons and words for numbers that need not be finite, as runs may hold them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

LARGEST = 1e70  # statistics take no score beyond it: they multiply four of them, and add such products


def exact_sum(values: Iterable[float], count: int = 1) -> float:
    """`math.fsum`, over `count`; infinite where that overflows, NaN for infinities of both signs."""
    numbers = [*values]
    try:
        return math.fsum(numbers) / count
    except OverflowError:  # of a partial sum; the total may be in range
        return exact_sum((number / 2**64 for number in numbers), count) * 2**64
    except ValueError:
        return math.nan


def mean(values: Collection[float]) -> float:
    """The mean of one value or more, also where their sum overflows; NaN for infinities of both signs."""
    return exact_sum(values, len(values))


def in_range(value: float) -> bool:
    """Whether statistics can take the value: it is finite, and so are the squares and cubes of such values."""
    return abs(value) < LARGEST


def exp(nats: float) -> float:
    """`math.exp`; infinite where that overflows."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def same_number(x: float, y: float) -> bool:
    """Equality under which NaN equals NaN."""
    return x == y or (math.isnan(x) and math.isnan(y))


def same_value(x: float, y: float, relative: float = 1e-12, absolute: float = 0.0) -> bool:
    """Whether two values of a metric are equal, allowing for another machine's rounding of a sum in a different order;
    or within the given tolerances."""
    return same_number(x, y) or math.isclose(x, y, rel_tol=relative, abs_tol=absolute)


def shown(value: float, spec: str) -> str:
    """A number for people: never "nan", "inf" or "-0.0000". spec: of `format`, such as ".4f" or "+.4f".

    A minus is ASCII's in every form, so that a number can be copied into a program; only LaTeX sets it in mathematics.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "-∞" if value < 0 else "∞"
    text = format(value, spec)
    if text.lstrip("+-").strip("0.,") == "":  # a zero has no sign
        return text.replace("-", "").replace("+", "")
    return text


def outcome_words(counts: Mapping[str, int]) -> str:
    """How programs ended, in words: "3 passed, 2 failed, 1 timeout"."""
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def arrow(higher_is_better: bool | None) -> str:
    """Which way a metric is better: `↑`, `↓`, or "" where that is not known."""
    return {True: "↑", False: "↓", None: ""}[higher_is_better]


def counted(count: int, noun: str) -> str:
    """A count with its noun: 1 document, 2,000 documents."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def p_value(p: float) -> str:
    """A p-value with two significant digits and more where they matter: 0.031, 0.0002, 1."""
    return f"{p:.2g}" if p >= 0.0001 else f"{p:.1e}"


def finite_json(value: Any) -> Any:
    """The value with None instead of each number that JSON cannot hold, at any depth."""
    if isinstance(value, Mapping):
        return {name: finite_json(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
