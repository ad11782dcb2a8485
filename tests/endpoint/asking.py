"""How tests ask an endpoint: a task of sums, and what its run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.command import Outcome, call

COUNT = 8


def write_sums(tmp_path: Path, count: int = COUNT) -> list[str]:
    """The settings of runs of a task of sums, whose files lie in `tmp_path`."""
    rows = [{"question": f"What is {n} + {n + 1 + n % 2} ?", "answer": str(2 * n + 1 + n % 2)} for n in range(count)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["task: sums", f"dataset_path: {tmp_path}/rows.jsonl", "output_type: generate_until", "test_split: test",
             'doc_to_text: "{{question}}"', 'doc_to_target: "{{answer}}"', "generation_kwargs: {max_gen_toks: 8}",
             "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]", ""]  # fmt: skip
    (tmp_path / "sums.yaml").write_text("\n".join(lines))
    return [f"task={tmp_path}/sums.yaml", "model.name=theirs", f"output_dir={tmp_path}/results", "progress=false"]


def ask(url: str, settings: list[str], *own: str) -> Outcome:
    return call(f"model.api={url}/v1", *settings, *own)


def only(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


def results(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("results_*.json")
    value: dict[str, Any] = json.loads(file.read_text())
    return value
