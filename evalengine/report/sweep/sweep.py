"""Several runs of one experiment, seen together: who equals whom, and how far fast arithmetic lies from invariant; as
tables on the terminal, with the verdict as the last line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalengine.errors import listed
from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.matrix import Matrix, matrix, matrix_lines, metric_name
from evalengine.report.compare.report import delta, value_text
from evalengine.report.numbers import counted
from evalengine.report.read.run import Run
from evalengine.util.sheet import Sheet
from evalengine.util.tables import print_lines

MODES = ("batch_invariant", "numerics")  # the settings that choose between fast and invariant arithmetic
SHOWN = 8  # runs that a line of `agreement` names, and groups of them


@dataclass(frozen=True, eq=False)
class Cell:
    """One run, and the swept settings that it had."""

    settings: Mapping[str, str]  # short name -> value, as swept
    run: Run

    @property
    def fast(self) -> bool:
        return self.run.manifest.numerics == "fast"

    @property
    def schedule(self) -> dict[str, str]:
        """The settings without those that choose the arithmetic."""
        return {name: value for name, value in self.settings.items() if name not in MODES}

    @property
    def label(self) -> str:
        """`exact, max_num_seqs 8`."""
        return ", ".join([str(self.run.manifest.numerics), *(f"{k} {v}" for k, v in self.schedule.items())])


@dataclass(frozen=True, eq=False)
class Floor:
    """A fast run against an invariant one (A) with the same other settings. Runs are numbered from 1."""

    settings: Mapping[str, str]
    invariant: int
    fast: int
    comparison: Comparison


@dataclass(frozen=True, eq=False)
class Sweep:
    """An experiment's result."""

    name: str
    cells: list[Cell]
    matrix: Matrix
    floors: list[Floor]

    @property
    def tasks(self) -> list[str]:
        return sorted({key[0] for cell in self.cells for key in cell.run.items})

    @property
    def promise_kept(self) -> bool:
        """Whether invariant runs of the same inputs (`identity`: everything but the schedule) are the same bits."""
        bits = {(_identity(cell.run), cell.run.digest) for cell in self.cells if not cell.fast}
        return len(bits) == self.num_inputs

    @property
    def num_inputs(self) -> int:
        """Different inputs (`identity`) among the invariant runs; a sweep may vary more than the schedule."""
        return len({_identity(cell.run) for cell in self.cells if not cell.fast})

    def digests(self, fast: bool) -> tuple[int, int]:
        """(runs, different digests among them) of one kind."""
        digests = [cell.run.digest for cell in self.cells if cell.fast == fast]
        return len(digests), len(set(digests))

    @property
    def agreement(self) -> list[str]:
        """`agreement` of its runs."""
        return [*agreement((n, not cell.fast, cell.run.digest) for n, cell in enumerate(self.cells, 1))]


def sweep(name: str, cells: Sequence[Cell]) -> Sweep:
    """Compares every pair of runs, and pairs each fast one with the invariant one of the same other settings.

    Invariant runs come first, in the given order.
    """
    ordered = sorted(cells, key=lambda cell: cell.fast)
    whole = matrix([cell.run for cell in ordered])
    floors = []
    for number, cell in enumerate(ordered, 1):
        partners = (n for n, x in enumerate(ordered, 1) if cell.fast and not x.fast and x.schedule == cell.schedule)
        partner = next(partners, None)
        if partner is not None and (partner, number) not in whole.refused:
            floors.append(Floor(cell.schedule, partner, number, whole.pairs[partner, number]))
    return Sweep(name, ordered, whole, floors)


def _identity(run: Run) -> str:
    return json.dumps(run.identity, sort_keys=True)


def agreement(runs: Iterable[tuple[int, bool, str | None]]) -> Iterator[str]:
    """A line per mode: which of its runs have equal digests. Nothing for a mode without a digest.

    runs: (number, batch_invariant, digest) of each run; a run that failed has no digest.
    """
    modes: dict[bool, dict[str | None, list[int]]] = {}
    for number, invariant, digest in runs:
        modes.setdefault(invariant, {}).setdefault(digest, []).append(number)
    for invariant, groups in modes.items():
        every = "the finished" if groups.pop(None, []) else "all"
        count = sum(map(len, groups.values()))
        mode = f"batch_invariant={'true' if invariant else 'false'}"
        if len(groups) == 1:
            (digest,) = groups
            yield f"{mode}: {f'{every} {count} runs agree' if count > 1 else '1 run'}, digest {str(digest)[:12]}"
        elif groups:
            equal = [f"runs {listed([*map(str, members)], SHOWN)} agree" for members in groups.values() if members[1:]]
            yield f"{mode}: {count} runs, {len(groups)} digests: {listed(equal, SHOWN, '; ') or 'no two agree'}"


def print_sweep(sweep: Sweep, files: Sequence[Path]) -> None:
    """Prints everything to standard output."""
    names = list(dict.fromkeys(name for cell in sweep.cells for name in cell.schedule))
    settings = [
        [str(cell.run.manifest.numerics), *(cell.schedule.get(name, "") for name in names)] for cell in sweep.cells
    ]
    lines = [*matrix_lines(sweep.matrix, (["numerics", *names], settings))]
    if sweep.floors:
        lines += ["Noise floor: fast against invariant, the same settings otherwise", floor_table(sweep)]
    print_lines([*lines, *map(str, files), *sweep.agreement, f"verdict: {verdict(sweep)}"])


def floor_table(sweep: Sweep) -> Sheet:
    """A row for each fast run: what its arithmetic and its batches moved; further metrics in their own rows."""
    names = sorted({name for floor in sweep.floors for name in floor.settings})
    moved = ("Requests that differ", "Diverging outputs", "Changed answers", "Logprobs that differ", "Largest change")
    rows = []
    for floor in sweep.floors:
        c, alone = floor.comparison, floor.comparison.kinds["answer"]
        differing, compared = c.logprob_counts
        first = [f"{floor.invariant}, {floor.fast}", *(floor.settings.get(name, "") for name in names)]
        first += [f"{len(c.differences)} of {c.common}", str(c.outputs)]
        first += [f"{c.changed}{f' ({alone} at an equal score)' if alone else ''}"]
        first += [f"{differing / compared:.1%}" if compared else "none", c.largest]
        for metric in c.metrics:
            name = f"{metric_name(metric.key, len(sweep.tasks) > 1)} ({metric.key[2]})"
            rows.append([*first, name, *("" if v is None else value_text(v) for v in metric.shown), delta(metric)])
            first = [""] * len(first)
    head = ("Runs", *names, *moved, "Metric", "Invariant", "Fast", "Delta")
    return Sheet("Noise floor", head, rows, (0, 1 + len(names) + len(moved)))


def verdict(sweep: Sweep) -> str:
    """Whether all invariant runs agree, and how much the fast runs move, on one line."""
    parts = []
    runs, digests = sweep.digests(fast=False)
    inputs = sweep.num_inputs
    if runs > inputs:
        outcome = "the same bits" if sweep.promise_kept else "DIFFERENT BITS"
        basis, each_input = (f" of {inputs} inputs", " for each") if inputs > 1 else ("", "")
        parts.append(f"{counted(runs, 'invariant run')}{basis}: {outcome}{each_input} ({counted(digests, 'digest')})")
    elif runs:  # each run has its own inputs, so none must equal another
        alone = ", no two of the same inputs" if runs > 1 else ""
        parts.append(f"{counted(runs, 'invariant run')}: {counted(digests, 'digest')}{alone}")
    runs, digests = sweep.digests(fast=True)
    if runs:
        parts.append(f"{counted(runs, 'fast run')}: {counted(digests, 'digest')}")
    if sweep.floors:
        parts.append(most(sweep))
    return "; ".join(parts)


def most(sweep: Sweep) -> str:
    """How far a fast run lies from its invariant partner, at most."""
    pairs = [floor.comparison for floor in sweep.floors]
    documents, change = max(c.documents for c in pairs), max(c.largest_change for c in pairs)
    answers = max(c.changed for c in pairs)
    flipped = f"up to {answers}" if answers else "none"
    odd = sum(c.logprobs.not_finite for c in pairs if c.logprobs is not None)
    moved = f"moves a logprob by up to {change:.2g} nat{f' ({odd} are NaN or infinite)' if odd else ''}"
    return f"fast flips {flipped} of {documents} answers and {moved}"
