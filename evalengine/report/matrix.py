"""Many runs at once: the verdict of every pair, and which runs are the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.table import Table

from evalengine.report.comparability import differing, incomparable
from evalengine.report.compare import Comparison, Level, compare
from evalengine.report.compare_tables import add, house_table
from evalengine.report.runs import Run

Pair = tuple[int, int]  # numbers of runs, from 1, the smaller first
WORST = ("DIFFERENT", "SAME TOKENS", "IDENTICAL")
RESOLVED = ("stats", "num_kv_blocks", "num_threads")  # engine settings that no one chose, or that say nothing


@dataclass(frozen=True, eq=False)
class Matrix:
    """Every pair of several runs: compared, or refused with the reasons."""

    runs: list[Run]
    pairs: dict[Pair, Comparison]
    refused: dict[Pair, list[str]]

    @property
    def verdict(self) -> str:
        """The furthest apart that any compared pair is."""
        found = {comparison.verdict for comparison in self.pairs.values()}
        return next((verdict for verdict in WORST if verdict in found), "NOT COMPARABLE")

    def within(self, level: Level) -> bool:
        """Whether every pair agrees at this level."""
        return not self.refused and all(comparison.within(level) for comparison in self.pairs.values())

    def groups(self) -> list[tuple[str, list[int]]]:
        """(digest, numbers of the runs that have it), largest group first; runs without a digest are in none."""
        found: dict[str, list[int]] = {}
        for number, run in enumerate(self.runs, 1):
            if run.digest:
                found.setdefault(run.digest, []).append(number)
        return sorted(found.items(), key=lambda group: (-len(group[1]), group[1]))


def matrix(runs: Sequence[Run], allow: bool = False) -> Matrix:
    """Compares every pair; unlike runs are refused, or with `allow` compared on what they share."""
    pairs, refused = {}, {}
    for (i, a), (j, b) in combinations(enumerate(runs, 1), 2):
        why = incomparable(a, b)
        if not a.items.keys() & b.items.keys():
            refused[i, j] = why or ["They have no request in common"]
        elif why and not allow:
            refused[i, j] = why
        else:
            pairs[i, j] = compare(a, b)
    return Matrix(list(runs), pairs, refused)


def matrix_report(m: Matrix) -> Iterator[Table | str]:
    """Everything to print, in order; a string is one line."""
    yield runs_table(m.runs)
    yield matrix_table(m)
    for digest, members in m.groups():
        runs = ", ".join(map(str, members))
        yield f"{'Runs' if len(members) > 1 else 'Run'} {runs}: digest {digest}"
    for (i, j), why in sorted(m.refused.items()):
        yield f"Runs {i} (A) and {j} (B) are not comparable:"
        yield from (f"  - {line}" for line in why)
    yield f"verdict: {m.verdict} ({evidence(m)})"


def evidence(m: Matrix) -> str:
    """The numbers behind the verdict."""
    identical = sum(comparison.verdict == "IDENTICAL" for comparison in m.pairs.values())
    refused = f", {len(m.refused)} not comparable" if m.refused else ""
    total = len(m.pairs) + len(m.refused)
    return f"{identical} of {total} pairs identical, {len(m.groups())} digests{refused}"


def matrix_table(m: Matrix) -> Table:
    """Verdicts of all pairs, with the number of differing requests."""
    numbers = range(1, len(m.runs) + 1)
    table = house_table(("", *map(str, numbers)), left=tuple(numbers))
    for i in numbers:
        add(table, [str(i), *(_cell(m, i, j) for j in numbers)])
    return table


def runs_table(runs: Sequence[Run]) -> Table:
    """Numbers, folders, and the settings in which the runs are not all alike."""
    names, rows = told_apart(runs)
    table = house_table(("Run", "Folder", *names, "Digest"), left=(1, len(names) + 2))
    for number, (run, values) in enumerate(zip(runs, rows, strict=True), 1):
        add(table, [str(number), run.source.name, *values, (run.digest or "none")[:12]])
    return table


def told_apart(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """(names of the settings in which the runs are not all alike, each run's values; "" where one is not set)."""
    settings = [_chosen(run) for run in runs]
    names = sorted({".".join(path) for other in settings[1:] for path, _, _ in differing(settings[0], other)})
    values = [[chosen.get(name) for name in names] for chosen in settings]
    return names, [["" if value is None else str(value) for value in row] for row in values]


def _cell(m: Matrix, i: int, j: int) -> str:
    if i == j:
        return "-"
    comparison = m.pairs.get((min(i, j), max(i, j)))
    if comparison is None:
        return "not comparable"
    if comparison.verdict == "IDENTICAL":
        return comparison.verdict
    return f"{comparison.verdict} {len(comparison.differences)}/{comparison.common}"


def _chosen(run: Run) -> dict[str, Any]:
    """A run's engine settings and its numerics, by name."""
    engine = run.manifest.get("engine")
    settings = dict(engine) if isinstance(engine, Mapping) else {}
    for name in ("numerics", "dtype", "attention_backend", "seed", "limit"):
        if name in run.identity:
            settings[name] = run.identity[name]
    return {name: value for name, value in settings.items() if name not in RESOLVED and not isinstance(value, Mapping)}
