"""Reads runs from another file, to stand beside ours: earlier runs of this engine, or another engine's.

The file is JSON with `rows`; each has `engine`, `mode`, `preset`, `workload` (texts), `requests` (a count) and `wall_s`
(seconds); what else it has is not read. Two runs are compared where preset, workload and number of requests are the
same. Another engine's row stands beside both of our modes and names its own; a row of this engine's stands beside the
same mode only. Several rows of one kind (rounds) count by their median.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, first_of
from evalengine.plain_text import printable
from evalengine.util.plain_files import read_json

OURS = "evalengine"
MOST_LISTED = 5
LONGEST = 10**9  # the most seconds that a run may have taken
TEXTS = ("engine", "mode", "preset", "workload")
Key = tuple[str, str, int]  # preset, workload, requests


@dataclass(frozen=True)
class Others:
    """A column of the table: one engine's seconds."""

    label: str
    seconds: Mapping[tuple[Key, str], float]  # (case, our mode beside which it stands) -> seconds


def read_others(path: Path) -> list[Others]:
    """A column for each engine and mode in the file. Raises ConfigError for a file that has none, or damaged rows."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare {path}: cannot be read as JSON ({error})") from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"--compare {path}: has no rows; give a file of bench throughput, or one with its keys")
    problems = [f"row {i}: {problem}" for i, row in enumerate(rows) if (problem := _problem(row))]
    if problems:
        raise ConfigError([f"--compare {path}: {problem}" for problem in first_of(problems, MOST_LISTED)])
    return _columns(rows)


def case_of(row: Mapping[str, Any]) -> Key:
    """The keys that two rows must share to be compared."""
    return row["preset"], row["workload"], row["requests"]


def _problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return "is no object"
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            return f"{name}: must be a text"
    if type(row.get("requests")) is not int:
        return "requests: must be an integer"
    wall = row.get("wall_s")
    if isinstance(wall, bool) or not isinstance(wall, int | float) or not 0 < wall < LONGEST:
        return f"wall_s: must be a number of seconds above 0, at most {LONGEST:,}"
    return None


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
