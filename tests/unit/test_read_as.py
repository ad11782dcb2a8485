"""Values from outside as typed ones: nothing is converted that a file does not mean, and all problems are listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, Strict
from typing_extensions import TypedDict

from evalengine.errors import ConfigError
from evalengine.util.validation import KNOWN_NAMES, Flag, Text, must, read_as

Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Share = Annotated[float, Field(gt=0, le=1), must("be in (0, 1]")]
Replicas = Annotated[Literal["auto"] | Annotated[Integer, Field(ge=1)], must("be auto or a positive number")]


@dataclass(frozen=True)
class Inner:
    count: Annotated[Integer, Field(ge=1, le=9)] = 3
    level: Literal["bitwise", "tokens"] = "tokens"
    names: tuple[Text, ...] = ()

    __pydantic_config__ = KNOWN_NAMES


class Outer(TypedDict, total=False):
    __pydantic_config__ = KNOWN_NAMES  # type: ignore[misc]
    inner: Inner
    each: dict[str, Inner]
    share: Share
    replicas: Replicas
    loose: int


@dataclass(frozen=True)
class Whole:
    name: Text
    on: Flag = False
    size: Number = 0.0
    inner: Inner = field(default_factory=Inner)


def test_what_fits_is_read_as_its_type() -> None:
    read = read_as(Whole, {"name": "a", "size": 3, "inner": {"names": ["x", "y"], "count": 9}})
    assert read == Whole("a", False, 3.0, Inner(9, "tokens", ("x", "y")))
    assert read_as(Outer, {"each": {"m": {}}, "replicas": "auto"}) == {"each": {"m": Inner()}, "replicas": "auto"}


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (Whole, {}, "run.name: is missing"),
        (Whole, {"name": 3}, "run.name=3: must be a valid string"),
        (Whole, {"name": "", "on": 1}, "run.on=1: must be true or false"),
        (Whole, {"name": "", "on": "true"}, "run.on='true': must be true or false"),
        (Whole, {"name": "", "size": True}, "run.size=True: must be a valid number"),
        (Whole, 3, "run=3: must be a mapping of names to values"),
        (Outer, {"inner": {"count": "5"}}, "run.inner.count='5': must be a valid integer"),
        (Outer, {"inner": {"count": True}}, "run.inner.count=True: must be a valid integer"),
        (Outer, {"inner": {"count": 2.0}}, "run.inner.count=2.0: must be a valid integer"),
        (Outer, {"inner": {"count": 0}}, "run.inner.count=0: must be greater than or equal to 1"),
        (Outer, {"inner": {"count": 10}}, "run.inner.count=10: must be less than or equal to 9"),
        (Outer, {"inner": {"level": "word"}}, "run.inner.level=word: must be 'bitwise' or 'tokens'"),
        (Outer, {"inner": {"names": ["x", None]}}, "run.inner.names[1]=None: must be a valid string"),
        (Outer, {"inner": {"names": "xy"}}, "run.inner.names=xy: must be a valid tuple"),
        (Outer, {"inner": {"cuont": 3}}, "run.inner.cuont: no such setting"),
        (Outer, {"each": {"m": 3}}, "run.each.m=3: must be a mapping of names to values"),
        (Outer, {"share": 0}, "run.share=0: must be in (0, 1]"),
        (Outer, {"share": "much"}, "run.share=much: must be in (0, 1]"),
        (Outer, {"replicas": 0}, "run.replicas=0: must be auto or a positive number"),
        (Outer, {"loose": "x"}, "run.loose=x: must be a valid integer"),
    ],
)
def test_a_problem_names_the_place_the_value_and_the_cure(kind: Any, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_as(kind, value, "run")
    assert caught.value.problems == [problem]


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        read_as(Outer, {"share": 2, "inner": {"count": 0, "level": 1}, "loose": None})
    assert caught.value.problems == [
        "inner.count=0: must be greater than or equal to 1",
        "inner.level=1: must be 'bitwise' or 'tokens'",
        "share=2: must be in (0, 1]",
        "loose=None: must be a valid integer",
    ]


def test_the_converting_types_take_texts_of_numbers() -> None:
    assert read_as(Outer, {"loose": "8"}) == {"loose": 8}
