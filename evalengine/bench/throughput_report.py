"""The results of `bench throughput` as a table, on the terminal and as Markdown, and as JSON.

The table has a line for each preset and workload; seconds are medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalengine.bench.environment import provenance, slug
from evalengine.bench.throughput import Measured
from evalengine.bench.throughput_compare import Key, Others, case_of
from evalengine.bench.timed_engine import MODES, Row, rank_suffix
from evalengine.util.sheet import Sheet, markdown_table

WHAT = (
    "Whole runs of the engine at the token level, greedy, end-of-sequence tokens ignored, from an empty prefix cache "
    "after a warm-up. Keys: evalengine/bench/throughput.py."
)
HEADINGS = ("preset", "workload", "requests", *(f"{m}, s" for m in MODES), *MODES, "of fast's speed", "of the floor's")
NONE = "-"


def sheet(rows: Sequence[Row], others: Sequence[Others]) -> Sheet:
    """A line for each preset, workload and number of requests, and a column for each other engine that ran them."""
    cases: dict[Key, dict[str, list[Row]]] = {}
    for row in rows:
        cases.setdefault(case_of(row), {}).setdefault(row["mode"], []).append(row)
    columns = [o for o in others if any((case, mode) in o.seconds for case, modes in cases.items() for mode in modes)]
    headings = [*HEADINGS, *(f"time / {o.label}'s" for o in columns)]
    return Sheet("Throughput", headings, [_cells(case, modes, columns) for case, modes in cases.items()], (0, 1))


def notes(measured: Measured, others: Sequence[Others]) -> Iterator[str]:
    """The lines below the table."""
    if others and len(sheet(measured.rows, others).head) == len(HEADINGS):
        yield "compared with nothing: the other file has no run of these presets, workloads and numbers of requests"
    names = ("copy_bytes_per_s", "matmul_flops_per_s", "lasting_flops_per_s")
    copy, flops, lasting = (measured.ceilings[name] / 1e12 for name in names)
    yield (
        "of the floor's: the least time possible over ours (invariant / fast), by ceilings measured in this run: "
        f"copies of {copy:.3g} TB/s, products of {flops:.3g} TFLOP/s ({lasting:.3g} where they last for seconds)"
    )
    yield from (f"{preset}: {how}" for preset, how in measured.arrangement.items())
    shares = {(r["preset"], r["workload"], r["mode"]): r["gpu_busy_share"] for r in measured.rows}
    for case, share in shares.items():
        if share is not None:
            yield f"GPU busy in steady decode, {', '.join(case)}: {share:.1%}"
    yield from _rank_ratios(measured.rows)
    yield from (f"digest: {line}" for line in _digests(measured.rows))
    for f in measured.failures:
        yield f"not measured: {f['preset']}, {f['workload']}, {f['mode']}: {f['error']}"


def differing_digests(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(model, workload) whose invariant runs, on any number of ranks, did not all give the same bytes."""
    return [case[:2] for case, digests in _invariant_digests(rows).items() if len(set(digests)) > 1]


def markdown(measured: Measured, others: Sequence[Others]) -> str:
    about = measured.environment
    libraries = ", ".join(f"{name} {version or 'absent'}" for name, version in about["libraries"].items())
    table = markdown_table(sheet(measured.rows, others))
    heading = [
        f"# Throughput on {about['gpu']}",
        "",
        f"{provenance(about)};",
        f"driver {about['driver']}, CUDA {about['cuda']}, {libraries}.",
        WHAT,
        "",
    ]
    return "\n".join([*heading, table, "", *(f"- {line.strip()}" for line in notes(measured, others)), ""])


def write(measured: Measured, others: Sequence[Others], folder: Path, name: str) -> tuple[Path, Path]:
    """Writes `<name>-<gpu>.json` and `.md` into `folder`, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{name}-{slug(measured.environment['gpu'])}"
    texts = {
        ".json": json.dumps({"what": WHAT, **asdict(measured)}, indent=1, ensure_ascii=False) + "\n",
        ".md": markdown(measured, others),
    }
    for suffix, text in texts.items():
        part = Path(f"{stem}{suffix}.part")  # A run that is killed leaves the last row's file whole.
        part.write_text(text, encoding="utf-8")
        part.replace(f"{stem}{suffix}")
    return Path(f"{stem}.json"), Path(f"{stem}.md")


def rate(row: Mapping[str, Any], wall_s: float) -> str:
    """Output tokens a second where there are any, else requests."""
    if row["output_tokens"]:
        return f"{row['output_tokens'] / wall_s:,.0f} tok/s"
    return f"{row['requests'] / wall_s:,.0f} req/s"


def _cells(case: Key, modes: Mapping[str, Sequence[Row]], columns: Sequence[Others]) -> list[str]:
    walls = {mode: statistics.median(row["wall_s"] for row in modes[mode]) for mode in MODES if mode in modes}
    floors = {mode: modes[mode][0]["floor_s"] / wall for mode, wall in walls.items()}
    cells = [case[0], case[1], f"{case[2]:,}"]
    cells += [f"{walls[mode]:.3f}" if mode in walls else NONE for mode in MODES]
    cells += [rate(modes[mode][0], walls[mode]) if mode in walls else NONE for mode in MODES]
    cells.append(f"{walls['fast'] / walls['invariant']:.3f}" if len(walls) == len(MODES) else NONE)
    cells.append(" / ".join(f"{floors[mode]:.2f}" if mode in floors else NONE for mode in MODES))
    for column in columns:
        compared = {mode: column.seconds.get((case, mode)) for mode in walls}
        ratios = [f"{walls[mode] / theirs:.2f}" if (theirs := compared.get(mode)) else NONE for mode in MODES]
        seconds = " / ".join(dict.fromkeys(f"{theirs:.3f}" for theirs in compared.values() if theirs))
        cells.append(f"{' / '.join(ratios)} of {seconds} s" if seconds else NONE)
    return cells


def _invariant_digests(rows: Sequence[Row]) -> dict[Key, list[str]]:
    """The digests of a model's invariant runs of a workload: one a round, on each number of ranks."""
    digests: defaultdict[Key, list[str]] = defaultdict(list)
    for row in rows:
        if row["mode"] == "invariant":
            digests[_model_of(row), row["workload"], row["requests"]].append(row["digest"])
    return digests


def _model_of(row: Mapping[str, Any]) -> str:
    """The row's preset without its number of ranks."""
    return str(row["preset"]).removesuffix(rank_suffix(row["tensor_parallel_size"]))


def _digests(rows: Sequence[Row]) -> Iterator[str]:
    for (model, workload, _), digests in _invariant_digests(rows).items():
        if len(digests) > 1:
            ranks = {row["tensor_parallel_size"] for row in rows if _model_of(row) == model}
            runs = f"{len(digests)} runs of {model}, {workload}"
            runs += f", on {', '.join(map(str, sorted(ranks)))} GPUs" if len(ranks) > 1 else ""
            same = "the same" if len(set(digests)) == 1 else "DIFFERENT"
            yield f"{runs}: the invariant mode gave {same} bytes"


def _rank_ratios(rows: Sequence[Row]) -> Iterator[str]:
    """How long several ranks took, relative to one rank in the same mode."""
    walls: defaultdict[tuple[str, str, str], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        walls[_model_of(row), row["workload"], row["mode"]][row["tensor_parallel_size"]].append(row["wall_s"])
    for case, by_ranks in walls.items():
        if one := by_ranks.pop(1, None):
            for ranks, seconds in by_ranks.items():
                ratio = statistics.median(seconds) / statistics.median(one)
                yield f"{', '.join(case)}: {ranks} GPUs take {ratio:.2f} of one GPU's time"
