"""Reads values from outside as the types that they must have, and says what is wrong with them, all at once.

From a caller, Python's, NumPy's and torch's integers and floats are accepted. Nothing is rounded, parsed or guessed:
1.7 is no token id, True is no number, and bytes are no token ids though they iterate as integers.

From a file or the command line, `read_as` reads by pydantic, which converts texts to numbers where it can:

    Share = Annotated[float, Field(gt=0, le=1), must("be in (0, 1]")]
    read_as(dict[str, Share], {"a": 0.5, "b": 2}, "gate")     ConfigError: gate.b=2: must be in (0, 1]
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from evalengine.errors import ConfigError

T = TypeVar("T")
Text = Annotated[str, Strict()]  # no number is taken as a text
Flag = Annotated[bool, Strict()]
KNOWN_NAMES = ConfigDict(extra="forbid")  # as `__pydantic_config__` of a class: unknown names are rejected
MOST_OF_NAME = 60  # characters of a name in messages: a file may have one of a megabyte
LARGEST = (1 << 63) - 1  # the largest int64
_NUMERIC_KINDS = "iuf"  # NumPy's kinds of numbers; the others (bool, datetime, ...) only look like some


def integer(value: Any) -> int | None:
    """The value as an integer; None if it is none. A bool is no integer."""
    if type(value) is int:
        return value
    value = _scalar(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """The value as a float, NaN and infinities included; None if it is no real number. Bools and strings are none."""
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def token_ids(value: Any) -> list[int] | None:
    """The integers of a sequence or a one-dimensional array as a new list; None for anything else."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        if getattr(value, "ndim", 0) != 1 or not _numeric(value):
            return None
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return None
    ids = list(value)
    if set(map(type, ids)) <= {int}:  # a fast path for the usual case: 20 ns for each id
        return ids
    read = [integer(i) for i in ids]
    return None if None in read else [i for i in read if i is not None]


def shown(value: Any) -> str:
    """A value in a message: Python's text of it, on one line and shortened."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # an integer of thousands of digits, or an object whose own repr fails
        return f"({type(value).__name__})"


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _numeric(value: Any) -> bool:
    kind = getattr(value.dtype, "kind", None)
    return str(value.dtype) != "torch.bool" if kind is None else kind in _NUMERIC_KINDS


def _scalar(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number; None for one without data; other values unchanged."""
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0 and _numeric(value):
        try:
            return value.item()
        except Exception:  # a tensor without data (device="meta")
            return None
    return value


def read_as(kind: type[T], value: Any, where: str = "", strict: bool | None = None) -> T:
    """The value as `kind`. Raises ConfigError that lists all that is wrong.

    value: plain values, or an object of `kind`. where: the whole's name in messages. strict: texts are no numbers.
    """
    try:
        read: T = adapter(kind).validate_python(value, strict=strict)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        raise ConfigError(problems_of(error, where)) from error
    return read


def read_fields(owner: Any) -> None:
    """Read the fields of a frozen dataclass as their types, in its `__post_init__`, except those without `Annotated`.
    Raises ConfigError that lists all that is wrong."""
    kind: Any = type(owner)
    vars(owner).update(read_as(_annotated(kind), vars(owner), strict=True))


@lru_cache(None)
def _annotated(kind: Any) -> Any:
    """The annotated fields of a class, as a mapping's type."""
    hints = get_type_hints(kind, include_extras=True)
    return TypedDict(kind.__name__, {name: hint for name, hint in hints.items() if "Annotated" in str(hint)})  # type: ignore[operator]


@lru_cache(None)
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The reader of values as `kind`, made once: that takes milliseconds."""
    return TypeAdapter(kind)


def must(expected: str) -> WrapValidator:
    """Report a value that does not fit by what it must do: "be in (0, 1]". A union needs this, since pydantic lists
    the problems of each of its members."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("must", "{text}", {"text": f"must {expected}"}) from None

    return WrapValidator(check)


def as_typed(value: Any) -> str:
    """A word as on the command line; any other value in quotes or shortened, so that "8" does not look like 8, nor the
    text "true" like true."""
    is_word = isinstance(value, str) and re.fullmatch(r"(?!(true|false|null)$)[a-z][\w:./-]{0,60}", value)
    return value if is_word else shown(value)


def problems_of(error: ValidationError, where: str = "", unknown: Callable[[str], str] | None = None) -> list[str]:
    """A sentence for each problem: the name of the setting, its value, and what it must be, in pydantic's words.
    unknown: makes the sentence for a name that does not exist."""
    return [_sentence(problem, where, unknown) for problem in error.errors(include_url=False)]


def _sentence(problem: ErrorDetails, where: str, unknown: Callable[[str], str] | None) -> str:
    kind, name = problem["type"], name_of(problem["loc"], where) or "it"
    if kind == "missing":
        return f"{name}: is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown(name) if unknown is not None else f"{name}: no such setting"
    if kind in ("dataclass_type", "model_type", "dict_type"):
        words = "must be a mapping of names to values"
    elif kind in ("bool_type", "bool_parsing"):
        words = "must be true or false"
    else:
        words = re.sub(r"^(?!Keys)\w+ should ", "must ", problem["msg"].removeprefix("Value error, "))
        words = re.sub(r", unable to .*| after validation, not \d+$", "", words)
    return f"{name}={as_typed(problem['input'])}: {words}"


def name_of(place: Sequence[str | int], where: str = "") -> str:
    """The dotted name of a place as pydantic names it: ("a", "b", 0) -> "a.b[0]"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:MOST_OF_NAME]}" for part in place if part != "[key]")
    return "".join([where, *parts]).removeprefix("." if not where else "")
