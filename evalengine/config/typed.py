"""Reads values from outside as typed ones by pydantic, and says in this package's words what is wrong, all at once.

    Share = Annotated[float, Field(gt=0, le=1), must("lie in (0, 1]")]
    read_as(dict[str, Share], {"a": 0.5, "b": 2, "c": None}, "gate")     ConfigError: gate.b=2: must lie in (0, 1]
                                                                                      gate.c=None: must lie in (0, 1]

pydantic converts texts to numbers where it can; `Text` and `Flag` take nothing else.
A class (dataclass, typing_extensions.TypedDict) with `__pydantic_config__ = KNOWN_NAMES` refuses unknown names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from evalengine.config.arguments import shown
from evalengine.errors import ConfigError

T = TypeVar("T")
Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
KNOWN_NAMES = ConfigDict(extra="forbid")
MOST_OF_NAME = 60  # characters of a name in messages: a file may have one of a megabyte
EXPECTED = (  # how pydantic's name of an error begins -> what the value must be
    *(("int", "an integer"), ("finite", "a finite number"), ("float", "a number"), ("bool", "true or false")),
    *(("string_too_short", "a text that is not empty"), ("string_pattern", "a text of the form {pattern}")),
    *(("too_short", "a list that is not empty"), ("string_unicode", "a text in UTF-8"), ("string", "a text")),
    ("list|tuple|set", "a list"),
    ("dict|mapping|dataclass|model", "a mapping of names to values"),
    *(("literal", "one of {expected}"), ("greater_than_equal", "at least {ge}"), ("greater_than", "more than {gt}")),
    *(("less_than_equal", "at most {le}"), ("less_than", "less than {lt}")),
)


def read_as(kind: type[T], value: Any, where: str = "", strict: bool | None = None) -> T:
    """The value as `kind`. Raises ConfigError that lists all that is wrong.

    value: plain values, or an object of `kind`. where: the whole's name in messages. strict: texts are no numbers.
    """
    try:
        read: T = adapter(kind).validate_python(value, strict=strict)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        raise ConfigError(problems_of(error, where)) from error
    return read


@lru_cache(None)
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What reads values as `kind`, made once: that takes milliseconds."""
    return TypeAdapter(kind)


def must(expected: str) -> WrapValidator:
    """Says of a value that does not fit what it must do: "lie in (0, 1]". A union needs this, since pydantic lists the
    problems of each of its members."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("must", "{text}", {"text": f"must {expected}"}) from None

    return WrapValidator(check)


def as_typed(value: Any) -> str:
    """A word as on the command line; any other value in quotes or shortened, so that "8" does not look like 8."""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z][\w:./-]{0,60}", value) else shown(value)


def problems_of(error: ValidationError, where: str = "") -> list[str]:
    """A sentence for each problem: the name of the setting, its value, and what it must be."""
    return [_sentence(problem, where) for problem in error.errors(include_url=False)]


def _sentence(problem: ErrorDetails, where: str) -> str:
    kind, name, context = problem["type"], name_of(problem["loc"], where) or "it", problem.get("ctx", {})
    if kind == "missing":
        return f"{name}: is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name}: no such setting"
    if kind == "literal_error":
        context["expected"] = context["expected"].replace(" or ", ", ").replace("'", "")
    words = next((f"must be {text.format(**context)}" for start, text in EXPECTED if re.match(start, kind)), None)
    return f"{name}={as_typed(problem['input'])}: {words or problem['msg'].removeprefix('Value error, ')}"


def name_of(place: Sequence[str | int], where: str = "") -> str:
    """The dotted name of a place as pydantic names it: ("a", "b", 0) -> "a.b[0]"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:MOST_OF_NAME]}" for part in place if part != "[key]")
    return "".join([where, *parts]).removeprefix("." if not where else "")
