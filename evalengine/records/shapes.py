"""Schemas of JSON from outside: one per file, checked once, where the file is read.

A shape is a type that pydantic checks: `Text`, `Count`, `dict[str, shape]`, `list[shape]`, ..., and for an object whose
names are known `with_fields({...})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, Strict, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

from evalengine.errors import listed
from evalengine.util.validation import KNOWN_NAMES, Flag, Text, adapter, is_unicode, must, problems_of

__all__ = ["AsciiText", "Count", "Flag", "Number", "Sha256", "Text", "UnicodeText", "Writable"]
__all__ += ["each", "fits", "with_fields", "wrong"]

MAX_SAID = 5
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Sha256 = Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{64}$"), must("be 64 hex digits")]


def _that(holds: Any) -> AfterValidator:
    """Refuses a value for which `holds` is false."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return AfterValidator(check)


UnicodeText = Annotated[str, Strict(), _that(is_unicode), must("be text without lone surrogates")]
AsciiText = Annotated[str, Strict(), Field(pattern=r"^[\x00-\x7f]*$"), must("be ASCII text")]
# A value that a float64 can hold, if it is a number.
Writable = Annotated[Any, _that(lambda x: not isinstance(x, int) or abs(x) < 2**1023), must("be of a float64's range")]


def with_fields(shapes: Mapping[str, Any], only: bool = False) -> Any:
    """The shape of an object that has these fields; "name?" may be missing or null.

    only: whether it has no others; else what is not named is not looked at.
    """
    kinds = {name.rstrip("?"): NotRequired[kind | None] if name[-1] == "?" else kind for name, kind in shapes.items()}
    config = KNOWN_NAMES if only else ConfigDict()
    return with_config(config)(TypedDict("Fields", kinds))  # type: ignore[operator]


def each(kind: Any) -> Any:
    """The shape of an object whose every value has the shape `kind`."""
    return dict[str, kind]


def wrong(value: Any, shape: Any) -> str:
    """The first few values that do not have their shape, in words; "" if all do."""
    try:
        adapter(shape).validate_python(value)
    except ValidationError as error:
        return listed(problems_of(error), MAX_SAID, "; ")
    return ""


def fits(value: Any, shape: Any) -> bool:
    """Whether the value has the shape."""
    return bool(adapter(shape).validator.isinstance_python(value))
