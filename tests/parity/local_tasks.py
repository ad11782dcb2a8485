"""lm-eval's tasks over small local files: every setting is lm-eval's, and only the rows are replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from evalengine.tasks.wikitext import split_pages

DATA = os.environ.get("EVALENGINE_DATA")
DOCS = 16  # evaluated documents


def rows_for(name: str, folder: Path) -> dict[str, str]:
    """Writes small splits of a task's rows, with some evaluated rows among the exemplars; returns split -> file."""
    assert DATA is not None
    base = {"gsm8k_cot": "gsm8k", "wikitext": "wikitext2"}.get(name, name)
    if name == "wikitext":
        rows = split_pages((Path(DATA) / base / "wiki.test.raw").read_text(encoding="utf-8"))
    else:
        split = "validation" if name == "hellaswag" else "test"
        lines = (Path(DATA) / base / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines[:150] if line]
    files = {}
    for split, part in {"train": rows[8:], "validation": rows[:DOCS], "test": rows[:DOCS]}.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("\n".join(json.dumps(row) for row in part), encoding="utf-8")
    return files


def task_manager() -> Any:
    """Returns lm-eval's index of all its tasks, that of `task=lm_eval/NAME`: it takes ten seconds to build."""
    from evalengine.integrations.lm_eval_tasks.index import lm_eval_tasks

    manager, _ = lm_eval_tasks()
    return manager


def lm_eval_task_file(name: str, files: dict[str, str]) -> Path:
    """Writes a task file beside the rows that includes lm-eval's own; returns its path."""
    config = Path(files["test"]).with_name("theirs.yaml")
    override = {"include": str(task_manager().task_index[name].yaml_path), "task": name, "dataset_path": "json"}
    override.update(dataset_name=None, dataset_kwargs={"data_files": files})
    config.write_text(yaml.safe_dump(override), encoding="utf-8")
    return config
