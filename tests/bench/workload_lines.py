"""Workloads and rows of a throughput table, written as their files have them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from evalengine.bench.workloads import VOCAB_SIZE, Workload, make_workload

SCORE = {"kind": "loglikelihood", "segments": [1, 0], "context": [7], "continuations": [[8], [9, 3]]}


def write_lines(path: Path, *lines: Any) -> Path:
    """Writes lines, objects as JSON and texts as they are, as a workload's gzip file."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes(gzip.compress("\n".join(texts).encode()))
    return path


def workload(name: str, files: dict[str, Path] | None = None, most: int | None = None, **limits: int) -> Workload:
    """The workload as it is for the preset qwen3-8b, with at most `most` requests."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": 40960, **limits}
    return make_workload(name, files or {}, "qwen3-8b", sizes["vocab_size"], sizes["max_model_len"], most)


def a_row(mode: str, wall: float, **changes: Any) -> dict[str, Any]:
    """A row of a throughput table in which `changes` replace members."""
    row = {"engine": "evalengine", "mode": mode, "preset": "qwen3-8b", "workload": "random", "round": 0,
           "requests": 256, "output_tokens": 1000, "wall_s": wall, "floor_s": 1.0, "digest": mode,
           "tensor_parallel_size": 1}  # fmt: skip
    return {**row, **changes}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text(json.dumps({"what": "", "rows": rows}))
    return path
