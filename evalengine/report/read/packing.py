"""Columns of a baseline file, small: hashes and floats as base85 of their bytes, constants and counts once.

Base85 (`base64.b85encode`) needs 5 characters for 4 bytes, and none that JSON escapes. Nothing is cut: a baseline's
hashes equal a run's.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Sequence
from typing import Any

MAX_ROWS = 10_000_000  # most values of a column
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pack_hashes(values: Sequence[str]) -> Any:
    """SHA-256 hex digests as one base85 string; "" if all are ""; the list as it is if any is something else."""
    if not any(values):
        return ""
    if all(_SHA256.fullmatch(value) for value in values):
        return base64.b85encode(bytes.fromhex("".join(values))).decode()
    return list(values)


def unpack_hashes(packed: Any, count: int) -> list[str]:
    """The hashes that `pack_hashes` packed. Raises `ValueError` if there are not `count`."""
    if packed == "":
        return [""] * _plausible(count)
    if isinstance(packed, list):
        return _counted([str(value) for value in packed], count)
    digits = base64.b85decode(packed).hex()
    return _counted([digits[i : i + 64] for i in range(0, len(digits), 64)], count)


def pack_floats(values: Sequence[float | None]) -> Any:
    """float64, little-endian, as base85: bit for bit, infinities and NaN too; null if all are None."""
    if all(value is None for value in values):
        return None
    if all(value is not None for value in values):
        return base64.b85encode(struct.pack(f"<{len(values)}d", *values)).decode()
    return [None if value is None else float.hex(value) for value in values]


def unpack_floats(packed: Any, count: int) -> list[float | None]:
    """The values that `pack_floats` packed. Raises `ValueError` if there are not `count`."""
    if packed is None:
        return [None] * _plausible(count)
    if isinstance(packed, list):
        return _counted([None if value is None else float.fromhex(value) for value in packed], count)
    try:
        return list(struct.unpack(f"<{count}d", base64.b85decode(packed)))
    except struct.error as error:
        raise ValueError(str(error)) from error


def fold(values: Sequence[Any]) -> Any:
    """A column: {"all": value} if constant, {"from": first} if it counts up by one, the list otherwise."""
    if values and all(value == values[0] for value in values):
        return {"all": values[0]}
    if all(isinstance(value, int) and value == values[0] + i for i, value in enumerate(values)):
        return {"from": values[0]} if values else []
    return list(values)


def unfold(column: Any, count: int) -> list[Any]:
    """The column that `fold` folded. Raises `ValueError` if it does not hold `count` values."""
    if isinstance(column, dict):
        count = _plausible(count)
        return [column["all"]] * count if "all" in column else [column["from"] + i for i in range(count)]
    return _counted(list(column), count)


def pack_number(value: float | None) -> Any:
    """A readable number: integers without ".0"; what JSON cannot write ("nan", "inf") as text."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def unpack_number(value: Any) -> float | None:
    return None if value is None else float(value)


def _plausible(count: Any) -> int:
    """The length of a column that does not hold its own length; a made-up length must not fill the memory."""
    if not isinstance(count, int) or not 0 <= count <= MAX_ROWS:
        raise ValueError(f"a column of {str(count)[:20] if not isinstance(count, int) else 'too many'} values")
    return count


def _counted(values: list[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise ValueError(f"{len(values)} values where {count} belong")
    return values
