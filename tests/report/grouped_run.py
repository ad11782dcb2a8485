"""An output folder in lm-eval's form of several tasks in groups, with real samples of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalengine.report.numbers import mean
from tests.report.written_run import Doc, write_generations


def write_grouped(folder: Path, scores: Mapping[str, Sequence[float]], groups: Mapping[str, Sequence[str]]) -> Path:
    """scores: of each task's documents. groups: their members; each has the mean over all documents of its tasks."""
    folder.mkdir(parents=True)
    merged: dict[str, Any] = {}
    for task, values in scores.items():
        docs = [Doc(f"{task} {n}", target=f"#### {n}", answer=str(n), score=value) for n, value in enumerate(values)]
        source = write_generations(folder.parent / f"{folder.name}-{task}", docs, task=task)
        (samples,) = source.glob("samples_*.jsonl")
        (folder / samples.name).write_bytes(samples.read_bytes())
        (file,) = source.glob("results_*.json")
        for key, value in json.loads(file.read_text()).items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    merged["group_subtasks"] = {name: list(members) for name, members in groups.items()}

    def below(name: str) -> list[float]:
        members = groups.get(name)
        return list(scores[name]) if members is None else [value for member in members for value in below(member)]

    for name in groups:
        values = below(name)
        merged["results"][name] = {"exact_match,strict-match": mean(values)}
        merged["higher_is_better"][name] = {"exact_match": True}
    (folder / file.name).write_text(json.dumps(merged))
    return folder
