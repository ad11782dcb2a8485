"""An experiment's end on disk: `<experiment>.svg`, the matrix as a picture for light and dark pages, and
`<experiment>.json`, written last."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalengine.plain_text import json_lines
from evalengine.records.folder import write_failed, write_whole
from evalengine.records.sealed import content_sha256
from evalengine.report.compare.as_json import run_json
from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.matrix import leading_metrics, look, score_text, what_differs
from evalengine.report.html.markup import Node, markup, tag
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.parts import sheet_table
from evalengine.report.numbers import counted, finite_json
from evalengine.report.read.names import SWEEP_FORMAT
from evalengine.report.read.run import by_name
from evalengine.report.sweep.sweep import Sweep, floor_table, most, verdict

WIDTH, HEIGHT, GAP, TOP = 112, 46, 3, 104  # a cell's size, the space between cells and above the matrix: pixels
LETTER = 7.6  # pixels of a character of the labels, at most
LEGEND = (
    "Green: equal bits. Pale: same tokens, other logprobs. Yellow: other outputs, no score beyond chance. Red: beyond.",
    "Counts are of requests that differ; on the diagonal each run's score.",
)
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #1b2126; }
.title { font-size: 16px; font-weight: 600; } .soft { fill: #56616b; } .small { font-size: 11px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.paper { fill: #fbfbfa; } .same { fill: #bfe0dc; } .tokens { fill: #e3f1ef; } .some { fill: #f6eccb; }
.other { fill: #f3c9b3; } .self { fill: #e9ecee; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8ea; } .soft { fill: #a3adb5; }
.paper { fill: #14181b; } .same { fill: #1c5a54; } .tokens { fill: #17322f; } .some { fill: #4a3f17; }
.other { fill: #74391f; } .self { fill: #262c31; }
}
"""
VERSION = 1


def picture(sweep: Sweep) -> str:
    """The matrix as SVG: equal bits in one colour, differing ones in another with how much differs."""
    labels = [cell.label for cell in sweep.cells]
    left = 48 + int(max(map(len, labels)) * LETTER)
    size = len(sweep.cells)
    about = sweep.cells[0].run
    lines = [f"{verdict(sweep).partition('; fast flips')[0]}.", f"{most(sweep)}." if sweep.floors else ""]
    height = TOP + size * (HEIGHT + GAP) + 76
    model = about.manifest.model.name or about.name
    heading = f"{'+'.join(sweep.tasks)}, {model}: {len(about.items)} requests a run"
    letters = max(len(heading) * 1.2, *(len(line) * 0.9 for line in (*LEGEND, *lines)))
    width = max(left + size * (WIDTH + GAP) + 16, 32 + int(letters * LETTER))
    drawn = [
        tag("title", f"{sweep.name}: {verdict(sweep)}"),
        tag("style", STYLE),
        tag("rect", class_="paper", width=width, height=height, rx=6),
        tag("text", heading, x=16, y=30, class_="title"),
        *(tag("text", line, x=16, y=50 + 19 * n, class_="soft") for n, line in enumerate(LEGEND)),
        *(_row(sweep, number, label, left) for number, label in enumerate(labels, 1)),
        *(
            tag("text", str(n), x=left + (n - 1) * (WIDTH + GAP) + WIDTH // 2, y=TOP - 8, class_="soft middle")
            for n in range(1, size + 1)
        ),
        *(
            tag("text", line[:1].upper() + line[1:], x=16, y=TOP + size * (HEIGHT + GAP) + 28 + 20 * i, class_="soft")
            for i, line in enumerate(lines)
        ),
    ]
    space, size_of = "http://www.w3.org/2000/svg", {"width": width, "height": height}
    return f"{markup(tag('svg', *drawn, xmlns=space, view_box=f'0 0 {width} {height}', **size_of))}\n"


def _row(sweep: Sweep, row: int, label: str, left: int) -> Node:
    y = TOP + (row - 1) * (HEIGHT + GAP)
    cells = [
        tag("text", label, x=left - 30, y=y + HEIGHT // 2 + 5, class_="end"),
        tag("text", str(row), x=left - 10, y=y + HEIGHT // 2 + 5, class_="end soft"),
    ]
    for column in range(1, len(sweep.cells) + 1):
        x = left + (column - 1) * (WIDTH + GAP)
        look, big, small = _cell(sweep, row, column)
        cells.append(tag("rect", class_=look, x=x, y=y, width=WIDTH, height=HEIGHT, rx=3))
        middle = y + (HEIGHT // 2 + 5 if not small else HEIGHT // 2)
        cells.append(tag("text", big, x=x + WIDTH // 2, y=middle, class_="middle"))
        if small:
            cells.append(tag("text", small, x=x + WIDTH // 2, y=middle + 15, class_="middle small soft"))
    return tag("g", *cells)


def _cell(sweep: Sweep, row: int, column: int) -> tuple[str, str, str]:
    """(class, large text, small text) of a cell."""
    if row == column:
        run = sweep.cells[row - 1].run
        metrics = leading_metrics([cell.run for cell in sweep.cells])
        return "self", score_text(run, metrics[0]) if metrics else "", ""
    comparison = sweep.matrix.pairs.get((min(row, column), max(row, column)))
    if comparison is None:
        return "self", "unlike", ""
    word, _ = what_differs(comparison)
    if comparison.verdict == "IDENTICAL":
        return look(comparison), word, ""
    big = word if comparison.verdict == "SAME TOKENS" else counted(comparison.outputs, "output")
    return look(comparison), big, f"logprobs {len(comparison.differences)}/{comparison.common}"


def write_sweep(sweep: Sweep, folder: Path) -> list[Path]:
    """Writes the page, the picture and the list, each whole or not at all. Raises `EvalEngineError` if the disk
    refuses."""
    page = matrix_page(sweep.matrix)
    if sweep.floors:
        page.section("noise", "Noise floor: fast against invariant", sheet_table(floor_table(sweep)))
    page.write(folder / f"{sweep.name}.html")
    files = write_picture_and_list(sweep.name, folder, picture(sweep), sweep_json(sweep, folder))
    return [folder / f"{sweep.name}.html", *files]


def write_picture_and_list(name: str, folder: Path, drawn: str, content: dict[str, Any]) -> list[Path]:
    """Writes `<name>.svg`, and `<name>.json`, which names the runs and holds the picture's hash and its own.

    Raises `EvalEngineError` if the disk refuses.
    """
    picture_file = folder / f"{name}.svg"
    _write(picture_file, drawn)
    content = {**content, "picture_sha256": hashlib.sha256(drawn.encode()).hexdigest()}
    return [picture_file, write_list(name, folder, content)]


def write_list(name: str, folder: Path, content: dict[str, Any]) -> Path:
    """Writes `<name>.json`, which names the runs and holds its own hash. Raises `EvalEngineError` if the disk
    refuses."""
    file = folder / f"{name}.json"
    # The hash is of the content as a reader of the file gets it.
    _write(file, json_lines({**content, "sha256": content_sha256(json.loads(json.dumps(content, allow_nan=False)))}))
    return file


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise write_failed(file, error) from error


def sweep_json(sweep: Sweep, folder: Path) -> dict[str, Any]:
    """The experiment as JSON values, whose names stay; `compare RUN RUN --json` has a pair's single differences. Runs
    are numbered from 1, and their places are relative to `folder`, which can be moved."""
    content = {
        "format": SWEEP_FORMAT,
        "version": VERSION,
        "experiment": sweep.name,
        "verdict": verdict(sweep),
        "agreement": sweep.agreement,
        "invariant_runs_equal": sweep.promise_kept,
        "runs": [
            {
                **run_json(cell.run),
                "source": os.path.relpath(cell.run.source, folder),
                "settings": dict(cell.settings),
                "numerics": cell.run.manifest.numerics,
                **{name: cell.run.manifest.content.get(name) for name in ("model", "hardware", "libraries", "code")},
            }
            for cell in sweep.cells
        ],
        "groups": [{"digest": digest, "runs": members} for digest, members in sweep.matrix.groups()],
        "pairs": [{"pair": list(pair), **_pair(c)} for pair, c in sorted(sweep.matrix.pairs.items())],
        "refused": [{"pair": list(pair), "why": why} for pair, why in sorted(sweep.matrix.refused.items())],
        "noise_floor": [
            {
                "settings": dict(floor.settings),
                "invariant": floor.invariant,
                "fast": floor.fast,
                **_pair(floor.comparison),
                "metrics": [
                    {**by_name(m.key), "invariant": m.value_a, "fast": m.value_b, "delta": m.difference}
                    for m in floor.comparison.metrics
                ],
            }
            for floor in sweep.floors
        ],
    }
    plain: dict[str, Any] = finite_json(content)
    return plain


def _pair(c: Comparison) -> dict[str, Any]:
    differing, compared = c.logprob_counts
    return {
        "verdict": c.verdict,
        "requests": c.common,
        "differing_requests": len(c.differences),
        "differing_outputs": c.outputs,
        "flipped_answers": c.changed,
        "flipped_answers_by_change": c.answers,
        "logprobs": {"compared": compared, "differing": differing, "largest_change_nat": c.largest_change},
        "change": None if c.logprobs is None else asdict(c.logprobs),
    }
