"""How long a document of a task takes: by the newest run here, or else by the reference records of this checkout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evalengine.report.read.index import Entry, entries
from evalengine.util.plain_files import read_json

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
CHOICES = {"gsm8k": 1, "mmlu": 4, "hellaswag": 4}  # workload of `bench throughput` -> requests of a document


@dataclass(frozen=True)
class Pace:
    """Seconds a document, and what says so."""

    seconds: float
    source: str


def pace(task: str, root: Path) -> Pace | None:
    """Of a task's or a group's name; None where nothing is known."""
    return _here(task, root) or _reference(task)


def _here(task: str, root: Path) -> Pace | None:
    try:
        listed: Sequence[Entry] = entries(root) if root.is_dir() else ()
    except OSError:
        return None
    for entry in listed:  # the newest first
        if entry.task == task and entry.pace is not None:
            return Pace(entry.pace, f"{entry.folder}, {entry.model or 'a model without a name'}")
    return None


def _reference(task: str) -> Pace | None:
    """The quickest invariant run of the workload of this name, on the smallest model."""
    found = []
    for file in sorted(REFERENCE.glob("throughput-*.json")) if task in CHOICES else ():
        try:
            content = read_json(file)
            gpu = content["environment"]["gpu"]
            rows = [row for row in content["rows"] if row["workload"] == task and row["mode"] != "fast"]
            own = [(row["wall_s"] * CHOICES[task] / row["requests"], row["preset"], gpu, file.name)
                   for row in rows if row["engine"] == "evalengine"]  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found += own
    if not found:
        return None
    seconds, preset, gpu, name = min(found)
    return Pace(seconds, f"results/reference/{name}, {preset} on {gpu}")
