"""The noise floor on a page: fast against invariant numerics, on the same inputs."""

from __future__ import annotations

from evalengine.records.manifest import resumed_fast
from evalengine.report.compare.comparability import resumed_words
from evalengine.report.compare.noise_floor import NoiseFloor
from evalengine.report.html.markup import Child, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import facts, table, tiles
from evalengine.report.html.plots import percent
from evalengine.report.read.run import Run


def noise_floor_section(page: Page, found: NoiseFloor) -> None:
    """Flips, metric deltas, the largest logprob change, and both runs' time."""
    level = found.invariant.manifest["numerics"]
    change = found.logprobs
    figures: list[tuple[str, Child, Child]] = [
        ("Requests whose bits differ", f"{found.differing:,}", f"of {found.requests:,}"),
        ("Outputs that part", f"{found.outputs:,}", f"of {found.requests:,}"),
        (
            "Answers that flipped",
            f"{found.answers:,}",
            f"of {found.documents:,} documents{f'; {found.alone}' * bool(found.alone)}",
        ),
    ]
    if found.compared:
        differing, unknown = (change.differing, change.not_finite) if change else (0, 0)
        share = f"{percent(differing / found.compared)} of {found.compared:,} logprobs differ"
        share += f"; {unknown:,} have no distance: NaN or infinite" if unknown else ""
        figures.append(("Largest logprob change", change.largest if change else "0 nat", share))
    several = len({m.key[0] for m in found.metrics}) > 1
    rows: list[list[Child]] = [
        [
            *([m.key[0]] if several else []),
            *(m.key[1], f"{m.invariant:.4f}", f"{m.fast:.4f}", f"{m.fast - m.invariant:+.4f}"),
            *((f"{m.gained:,}", f"{m.lost:,}") if m.documents else ("", "")),
            m.key[2],
        ]
        for m in found.metrics
    ]
    head = ["Task"] * several + ["Metric", level, "fast", "Delta", "Higher in fast", "Lower in fast", "Filter"]
    right = range(1 + several, 6 + several)
    sources = facts(
        (f"{_level(run)}, {_seconds(run)}", tag("code", run.source.name)) for run in (found.invariant, found.fast)
    )
    note = (
        "The same inputs under both kinds of arithmetic. A difference between two fast runs that is no larger than "
        "this says nothing about the model."
    )
    if kept := resumed_fast(found.fast.manifest):
        note += f" The fast run {resumed_words(found.fast, kept)}."
    drawn = table(head, rows, numbers=right)
    page.section("noise", "Noise floor: fast against invariant", tiles(figures), drawn, sources, note=note)


def _level(run: Run) -> str:
    return str(run.manifest["numerics"])


def _seconds(run: Run) -> str:
    seconds, kept = run.manifest["timings"]["run_seconds"], run.manifest["counts"]["resumed_requests"]
    return f"{seconds:,.1f} s" + (" (resumed)" if kept else "")
