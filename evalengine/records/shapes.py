"""What JSON from outside must look like before it is used: one shape a file, checked once, where the file is read.

A shape is a predicate (`text`, `number`, ...), `{name: shape}` for an object ("name?" may be missing or null),
`[shape]` for a list, or `Each(shape)` for an object of any names. What a shape does not name is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evalengine.errors import listed

MAX_SAID = 5


@dataclass(frozen=True)
class Each:
    """An object whose every value has this shape."""

    shape: Any


def text(value: Any) -> bool:
    """text"""
    return isinstance(value, str)


def utf8_text(value: Any) -> bool:
    """text without lone surrogates"""
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode() == value


def ascii_text(value: Any) -> bool:
    """ASCII text"""
    return isinstance(value, str) and value.isascii()


def truth(value: Any) -> bool:
    """true or false"""
    return isinstance(value, bool)


def count(value: Any) -> bool:
    """an integer of 0 or more"""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def number(value: Any) -> bool:
    """a finite number"""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1023


def sha256(value: Any) -> bool:
    """64 hex digits"""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def anything(value: Any) -> bool:
    """a value"""
    return True


def writable(value: Any) -> bool:
    """a value that a float64 can hold"""
    return not isinstance(value, int) or abs(value) < 2**1023


def perhaps_object(value: Any) -> bool:
    """an object or null"""
    return value is None or isinstance(value, dict)


def wrong(value: Any, shape: Any) -> str:
    """What does not have its shape, in words, the first few; "" if all does."""
    if _fits(value, shape):
        return ""
    return listed([*_wrong(value, shape, "")], MAX_SAID, "; ")


def _fits(value: Any, shape: Any) -> bool:
    """Whether nothing is wrong. Samples have a hundred thousand values, so words are made only where one is wrong."""
    if type(shape) is dict:
        if type(value) is not dict:
            return False
        for name, expected in shape.items():
            if name[-1] != "?":
                if name not in value:
                    return False
                inner = value[name]
            elif (inner := value.get(name[:-1])) is None:
                continue
            if not (expected(inner) if callable(expected) else _fits(inner, expected)):
                return False
        return True
    if type(shape) is Each:
        return type(value) is dict and (
            shape.shape is anything or all(_fits(inner, shape.shape) for inner in value.values())
        )
    if type(shape) is list:
        return type(value) is list and (shape[0] is anything or all(_fits(inner, shape[0]) for inner in value))
    return bool(shape(value))


def _wrong(value: Any, shape: Any, where: str) -> Iterator[str]:
    at = where or "it"
    if isinstance(shape, Each | dict):
        if not isinstance(value, dict):
            yield f"{at} is {_short(value)}, not an object"
        elif isinstance(shape, Each):
            for name, inner in value.items():
                yield from _wrong(inner, shape.shape, _join(where, name))
        else:
            for name, expected in shape.items():
                optional, name = name.endswith("?"), name.removesuffix("?")
                if value.get(name) is not None or (not optional and name in value):
                    yield from _wrong(value[name], expected, _join(where, name))
                elif not optional:
                    yield f"{_join(where, name)} is missing"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{at} is {_short(value)}, not a list"
        else:
            for number_, inner in enumerate(value):
                yield from _wrong(inner, shape[0], f"{where}[{number_}]")
    elif not shape(value):
        yield f"{at} is {_short(value)}, not {shape.__doc__}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name[:60]}" if where else name[:60]


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a very long integer"
    literal = repr(value)
    return literal if len(literal) <= 40 else f"{literal[:37]}..."
