"""An experiment's end on disk: `<experiment>.svg`, a picture of the matrix, and `<experiment>.json`, written last."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalengine.plain_text import json_lines
from evalengine.records.folder import write_failed, write_whole
from evalengine.records.sealed import content_sha256
from evalengine.report.compare.as_json import run_json
from evalengine.report.compare.compare import Comparison
from evalengine.report.read.names import SWEEP_FORMAT
from evalengine.report.sweep.picture import picture
from evalengine.report.sweep.sweep import Sweep, verdict

VERSION = 1


def write_sweep(sweep: Sweep, folder: Path) -> list[Path]:
    """Writes both files, each whole or not at all. Raises `EvalEngineError` if the disk refuses."""
    return write_picture_and_list(sweep.name, folder, picture(sweep), sweep_json(sweep, folder))


def write_picture_and_list(name: str, folder: Path, drawn: str, content: dict[str, Any]) -> list[Path]:
    """Writes `<name>.svg`, and `<name>.json`, which names the runs and holds the picture's hash and its own.

    Raises `EvalEngineError` if the disk refuses.
    """
    picture_file = folder / f"{name}.svg"
    _write(picture_file, drawn)
    return [picture_file, write_list(name, folder, {**content, "picture_sha256": _sha256(drawn)})]


def write_list(name: str, folder: Path, content: dict[str, Any]) -> Path:
    """Writes `<name>.json`, which names the runs and holds its own hash. Raises `EvalEngineError` if the disk
    refuses."""
    file = folder / f"{name}.json"
    # The hash is of the content as a reader of the file gets it.
    _write(file, json_lines({**content, "sha256": content_sha256(json.loads(json.dumps(content, allow_nan=False)))}))
    return file


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise write_failed(file, error) from error


def sweep_json(sweep: Sweep, folder: Path) -> dict[str, Any]:
    """The experiment as JSON values, whose names stay; `compare RUN RUN --json` has a pair's single differences. Runs
    are numbered from 1, and their places are relative to `folder`, which can be moved."""
    return {
        "format": SWEEP_FORMAT,
        "version": VERSION,
        "experiment": sweep.name,
        "verdict": verdict(sweep),
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
                "metrics": list(_metrics(floor.comparison)),
            }
            for floor in sweep.floors
        ],
    }


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


def _metrics(c: Comparison) -> Iterator[dict[str, Any]]:
    for metric in c.metrics:
        a, b = (v if v is not None and math.isfinite(v) else None for v in (metric.value_a, metric.value_b))
        key = dict(zip(("task", "metric", "filter"), metric.key, strict=True))
        yield {**key, "invariant": a, "fast": b, "delta": None if a is None or b is None else b - a}
