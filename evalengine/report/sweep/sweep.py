"""Several runs of one experiment, seen together: who equals whom, and how far fast arithmetic lies from invariant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.matrix import Matrix, matrix
from evalengine.report.read.run import Run

MODES = ("batch_invariant", "numerics")  # the settings that choose between fast and invariant arithmetic


@dataclass(frozen=True, eq=False)
class Cell:
    """One run, and the swept settings that it had."""

    settings: Mapping[str, str]  # short name -> value, as swept
    run: Run

    @property
    def fast(self) -> bool:
        return self.run.manifest.numerics == "fast"

    @property
    def beside_mode(self) -> dict[str, str]:
        """The settings without those that choose the arithmetic."""
        return {name: value for name, value in self.settings.items() if name not in MODES}

    @property
    def label(self) -> str:
        """`exact, max_num_seqs 8`."""
        return ", ".join([str(self.run.manifest.numerics), *(f"{k} {v}" for k, v in self.beside_mode.items())])


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


def sweep(name: str, cells: Sequence[Cell]) -> Sweep:
    """Compares every pair of runs, and pairs each fast one with the invariant one of the same other settings.

    Invariant runs come first, in the given order.
    """
    ordered = sorted(cells, key=lambda cell: cell.fast)
    whole = matrix([cell.run for cell in ordered])
    floors = []
    for number, cell in enumerate(ordered, 1):
        partner = _partner(ordered, cell) if cell.fast else None
        if partner is not None and (partner, number) not in whole.refused:
            floors.append(Floor(cell.beside_mode, partner, number, whole.pairs[partner, number]))
    return Sweep(name, ordered, whole, floors)


def _partner(cells: Sequence[Cell], fast: Cell) -> int | None:
    """The number of the invariant run with the same other settings; None if there is none."""
    partners = (i for i, cell in enumerate(cells, 1) if not cell.fast and cell.beside_mode == fast.beside_mode)
    return next(partners, None)


def _identity(run: Run) -> str:
    return json.dumps(run.identity, sort_keys=True)
