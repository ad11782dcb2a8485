"""Reads runs from another file, to compare with ours: earlier runs of this engine, or another engine's.

The file is JSON with `rows`; each has `engine`, `mode`, `preset`, `workload` (texts), `requests` (a count) and `wall_s`
(seconds); what else it has is not read. Two runs are compared where preset, workload and number of requests are the
same. Another engine's row is compared with both of our modes and names its own; a row of this engine's with the
same mode only. Several rows of one kind (rounds) count by their median.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evalengine.errors import ConfigError, first_of
from evalengine.plain_text import printable
from evalengine.records.shapes import Count, Number, Text, with_fields, wrong
from evalengine.util.plain_files import read_json

OURS = "evalengine"
MOST_LISTED = 5
LONGEST = 10**9  # the most seconds that a run may have taken
TEXTS = ("engine", "mode", "preset", "workload")
_ROW = with_fields(
    {**dict.fromkeys(TEXTS, Text), "requests": Count, "wall_s": Annotated[Number, Field(gt=0, lt=LONGEST)]}
)
Key = tuple[str, str, int]  # preset, workload, requests


@dataclass(frozen=True)
class Others:
    """A column of the table: one engine's seconds."""

    label: str
    seconds: Mapping[tuple[Key, str], float]  # (case, our mode that it is compared with) -> seconds


def read_others(path: Path) -> list[Others]:
    """A column for each engine and mode in the file. Raises ConfigError for a file that has none, or damaged rows."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare {path}: cannot be read as JSON ({error})") from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"--compare {path}: has no rows; give a file of bench throughput, or one with its keys")
    problems = [f"row {i}: {problem}" for i, row in enumerate(rows) if (problem := wrong(row, _ROW))]
    if problems:
        raise ConfigError([f"--compare {path}: {problem}" for problem in first_of(problems, MOST_LISTED)])
    return _columns(rows)


def case_of(row: Mapping[str, Any]) -> Key:
    """The keys that two rows must share to be compared."""
    return row["preset"], row["workload"], row["requests"]


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Others]:
    wall_seconds: defaultdict[str, defaultdict[tuple[Key, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        ours = row["engine"] == OURS
        label = f"{OURS}, earlier" if ours else printable(f"{row['engine']}, {row['mode']}")
        for mode in (row["mode"],) if ours else ("invariant", "fast"):
            wall_seconds[label][case_of(row), mode].append(row["wall_s"])
    return [
        Others(label, {key: statistics.median(seconds) for key, seconds in cells.items()})
        for label, cells in wall_seconds.items()
    ]
