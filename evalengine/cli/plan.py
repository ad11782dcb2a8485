"""`python -m evalengine plan task=gsm8k margin=1`: how many documents a gate needs, before a run is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalengine.config.shipped import available
from evalengine.config.task_outline import outline
from evalengine.errors import ConfigError
from evalengine.report.read.index import Entry, entries
from evalengine.report.read.places import RESULTS
from evalengine.report.stats.loss_bound import documents_for
from evalengine.util.command import Namespace

FLIPS = (0.0, 0.005, 0.02, 0.05, 0.1)  # shares of changed answers for which the need is said
LEVELS = {"margin": None, "flips": None, "alpha": 0.05, "power": 0.8}


@dataclass(frozen=True)
class Wanted:
    """What a gate is to show. Shares of 1."""

    margin: float
    flips: tuple[float, ...]
    alpha: float
    power: float


def main(arguments: Namespace) -> int:
    """Runs `plan` with its words; returns the exit code. Raises ConfigError for bad usage."""
    tasks, wanted = _parsed(arguments.words)
    documents = {task: rows for name in tasks for task, rows in _documents(name).items()}
    needs = [documents_for(wanted.margin, flips, wanted.alpha, wanted.power) for flips in wanted.flips]
    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(Text(f"A margin of {100 * wanted.margin:g} points: documents for a pass with probability "
                       f"{wanted.power:g}, if nothing is lost (alpha {wanted.alpha:g})"))  # fmt: skip
    console.print(_table(documents, wanted, needs, _seconds(RESULTS)))
    console.print(Text("Flips: the share of answers that change for better or worse, as many of each. Exact and native "
                       "runs of equal weights have none; two checkpoints often 2 to 10 %."))  # fmt: skip
    return 0


def _parsed(words: Sequence[str]) -> tuple[list[str], Wanted]:
    """The tasks and what is wanted. Raises ConfigError with all problems."""
    values: dict[str, str] = {}
    problems = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("task", *LEVELS):
            problems.append(f"{word!r} is none of task=NAME, margin=POINTS, flips=2%, alpha=0.05, power=0.8")
        elif name in values:
            problems.append(f"{name} is given twice")
        values[name] = value
    numbers: dict[str, float | None] = {}
    for name, default in LEVELS.items():
        text = values.get(name)
        numbers[name] = default
        try:
            numbers[name] = default if text is None else float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            problems.append(f"{name}={text}: must be a number")
    tasks = [name for name in values.get("task", "").strip("[]").split(",") if name]
    problems += [f"task={name}: no task or group that is shipped; `python -m evalengine tasks` lists them"
                 for name in tasks if name not in available("task")]  # fmt: skip
    problems += [] if tasks else ["task=NAME is needed"]
    margin, flips, alpha, power = (numbers[name] for name in ("margin", "flips", "alpha", "power"))
    if margin is None:
        problems.append("margin=POINTS is needed: margin=1 is one point, 0.75 to 0.74")
    elif not 0 < margin <= 100:
        problems.append(f"margin={margin:g}: must lie in (0, 100] points")
    if flips is not None and not 0 <= flips <= 1:
        problems.append(f"flips={flips:g}: a share, 0.02 or 2%, of at most 1")
    assert alpha is not None and power is not None
    if not 0 < alpha <= 0.5 or not alpha < power < 1:
        problems.append(f"alpha={alpha:g} power={power:g}: alpha must lie in (0, 0.5], and power between it and 1")
    if problems:
        raise ConfigError([f"plan: {problem}" for problem in problems])
    assert margin is not None
    return tasks, Wanted(margin / 100, FLIPS if flips is None else (flips,), alpha, power)


def _documents(name: str) -> dict[str, int | None]:
    """How many documents each task has that `task=NAME` chooses; a group has those of its tasks together."""
    config = outline(name)
    rows = {task: settings.dataset.rows for task, settings in config.tasks.items()}
    if len(rows) > 1:
        whole = [count for count in rows.values() if count is not None]
        return {f"{name} ({len(rows)} tasks)": sum(whole) if len(whole) == len(rows) else None}
    return dict(rows)


def _seconds(root: Path) -> dict[str, float]:
    """Seconds a document took in the newest finished run of each task here."""
    try:
        listed: Sequence[Entry] = entries(root) if root.is_dir() else ()
    except OSError:
        return {}
    return {entry.task: entry.pace for entry in reversed(listed) if entry.pace is not None}


def _table(
    documents: Mapping[str, int | None], wanted: Wanted, needs: Sequence[int], seconds: Mapping[str, float]
) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(("Task", "Has", "Flips", "Needs", "Enough", "Time here")):
        table.add_column(head, justify="right" if number in (1, 2, 3, 5) else "left", no_wrap=True)
    for task, has in documents.items():
        for number, (flips, need) in enumerate(zip(wanted.flips, needs, strict=True)):
            first = [task, "?" if has is None else f"{has:,}"] if number == 0 else ["", ""]
            enough = "" if has is None else "yes" if has >= need else "no"
            each = seconds.get(task)
            time = "" if each is None or enough == "no" else f"{each * need:,.0f} s"
            table.add_row(*map(Text, [*first, f"{100 * flips:g} %", f"{need:,}", enough, time]))
    return table
