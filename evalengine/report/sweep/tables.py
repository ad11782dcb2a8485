"""An experiment's end on the terminal: the runs, the matrix, the noise floor, and the verdict as the last line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalengine.plain_text import printable
from evalengine.report.compare.compare import Comparison, MetricDelta
from evalengine.report.compare.matrix import counts_note, matrix_table, run_notes
from evalengine.report.numbers import counted, shown
from evalengine.report.sweep.sweep import Sweep
from evalengine.report.terminal.tables import add, house_table
from evalengine.util.tables import print_table


def print_sweep(sweep: Sweep, files: Sequence[Path]) -> None:
    """Prints everything to standard output."""
    console = Console(file=sys.stdout, soft_wrap=True)
    print_table(cells_table(sweep), console)
    print_table(matrix_table(sweep.matrix), console)
    for note in counts_note(sweep.matrix):
        console.print(Text(note))
    for (i, j), why in sorted(sweep.matrix.refused.items()):
        console.print(Text(printable(f"Runs {i} and {j} are not comparable: {'; '.join(why)}")))
    for note in run_notes(sweep.matrix.runs):
        console.print(Text(printable(note)))
    if sweep.floors:
        console.print(Text("Noise floor: fast against invariant, the same settings otherwise"))
        print_table(floor_table(sweep), console)
    for file in files:
        console.print(Text(printable(str(file))))
    console.print(Text(printable(f"verdict: {verdict(sweep)}")))


def cells_table(sweep: Sweep) -> Table:
    """Numbers, folders, and the swept settings, whether the engine's or a task's."""
    names = list(dict.fromkeys(name for cell in sweep.cells for name in cell.beside_mode))
    table = house_table(("Run", "Folder", "numerics", *names, "Digest"), left=(1, 2, len(names) + 3))
    for number, cell in enumerate(sweep.cells, 1):
        values = [cell.beside_mode.get(name, "") for name in names]
        numerics, digest = str(cell.run.manifest.numerics), cell.run.digest or "none"
        add(table, [str(number), cell.run.source.name, numerics, *values, digest[:12]])
    return table


def floor_table(sweep: Sweep) -> Table:
    """A row for each fast run: what its arithmetic and its batches moved; further metrics in rows of their own."""
    names = sorted({name for floor in sweep.floors for name in floor.settings})
    moved = ("Requests that differ", "Outputs that part", "Answers that flip", "Logprobs that differ", "Largest change")
    metric_columns = ("Metric", "Invariant", "Fast", "Delta")
    table = house_table(("Runs", *names, *moved, *metric_columns), left=(0, 1 + len(names) + len(moved)))
    for floor in sweep.floors:
        values = [floor.settings.get(name, "") for name in names]
        first = [f"{floor.invariant}, {floor.fast}", *values, *_moved(floor.comparison)]
        for metric in floor.comparison.metrics:
            add(table, [*first, *_metric(metric, len(sweep.tasks) > 1)])
            first = [""] * len(first)
    return table


def verdict(sweep: Sweep) -> str:
    """Whether the promise was kept, and how much the fast runs move, on one line."""
    parts = []
    runs, digests = sweep.digests(fast=False)
    inputs = sweep.num_inputs
    if runs > inputs:
        outcome = "the same bits" if sweep.promise_kept else "DIFFERENT BITS"
        basis, each_input = (f" of {inputs} inputs", " for each") if inputs > 1 else ("", "")
        parts.append(f"{counted(runs, 'invariant run')}{basis}: {outcome}{each_input} ({counted(digests, 'digest')})")
    elif runs:  # each run has inputs of its own, so none must equal another
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


def _metric(metric: MetricDelta, several_tasks: bool) -> Iterator[str]:
    task, name, filter_name = metric.key
    yield f"{f'{task} ' if several_tasks else ''}{name} ({filter_name})"
    a, b = metric.value_a, metric.value_b
    yield from ("" if value is None else shown(value, ".4f") for value in (a, b))
    yield "" if a is None or b is None else shown(b - a, "+.4f")


def _moved(c: Comparison) -> Iterator[str]:
    alone, (differing, compared) = c.kinds["answer"], c.logprob_counts
    yield f"{len(c.differences)} of {c.common}"
    yield str(c.outputs)
    yield f"{c.changed}{f' ({alone} at an equal score)' if alone else ''}"
    yield f"{differing / compared:.1%}" if compared else "none"
    yield c.largest
