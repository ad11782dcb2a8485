"""A run's samples as CSV, for a spreadsheet or another program: a row per task, document and filter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.folder import write_text_file
from evalengine.report.python.frames import samples_frame
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.run import Run


def write_samples(run: Run, target: Path) -> int:
    """Writes the columns of `frames.samples_frame`, whole or not at all; returns how many rows they have.

    A text is a cell as it is; lists and what a dataset's row holds are JSON; what a task has no metric for is empty.
    Lines end as RFC 4180 has them, so that both of their characters are quoted where a text holds them.

    Raises `ConfigError` for another ending than .csv, and for a baseline, which holds no samples; `EvalEngineError` if
    the disk refuses.
    """
    if target.suffix != ".csv":
        raise ConfigError(f"report: --samples {target}: is CSV: name a file that ends in .csv")
    if run.kind == "baseline":
        raise ConfigError(f"report: --samples: {run.source} is a baseline, which holds no texts; give the run's folder")
    _, samples = newest(run.source)
    frame = samples_frame(samples)
    for name in [name for name in frame if frame[name].dtype.kind == "O"]:
        frame[name] = frame[name].map(_cell)
    write_text_file(target, frame.to_csv(index=False, lineterminator="\r\n"))
    return len(frame)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
