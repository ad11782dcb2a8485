"""The task hashes of lm-eval over every local row, and the program that makes them.

    python -m tests.parity.all_rows        rewrites tests/parity/all_rows.json (needs lm-eval and EVALENGINE_DATA)

lm-eval's own tasks load the rows and write the requests; the hashes are computed as by its evaluator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalengine.config.shipped import outline
from evalengine.tasks.wikitext import split_pages

HASHES = Path(__file__).with_name("all_rows.json")
CHOSEN = {  # task or group -> number of exemplars; only MMLU and GSM8K have exemplars among the local rows
    "arc_challenge": 0,
    "arc_easy": 0,
    "gsm8k": 5,
    "hellaswag": 0,
    "lambada_openai": 0,
    "mmlu": 5,
    "wikitext": 0,
    "ifeval": 0,
}
Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def local_rows(data: Path, name: str) -> dict[str, list[Row]]:
    """Returns a task's local rows by split; for a subject of MMLU, the rows of that subject."""
    if name == "wikitext":
        return {"test": split_pages((data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8"))}
    folder = data / ("mmlu" if name.startswith("mmlu_") else name)
    splits = {file.stem: read(file) for file in sorted(folder.glob("*.jsonl"))}
    if name == "ifeval":
        return {"train": with_all_arguments(splits["train"])}
    if name.startswith("mmlu_"):
        subject = name.removeprefix("mmlu_")
        return {split: [row for row in rows if row["subject"] == subject] for split, rows in splits.items()}
    return splits


def with_all_arguments(rows: list[Row]) -> list[Row]:
    """Gives every row of IFEval every argument, null where it has none, as the rows on the Hub have."""
    names = sorted({name for row in rows for given in row["kwargs"] for name in given})
    completed = [[{name: given.get(name) for name in names} for given in row["kwargs"]] for row in rows]
    return [{**row, "kwargs": arguments} for row, arguments in zip(rows, completed, strict=True)]


def tasks() -> Iterator[tuple[str, str, int]]:
    """Yields (task or group chosen, task, number of exemplars)."""
    for chosen, shots in CHOSEN.items():
        yield from ((chosen, name, shots) for name in outline(chosen).tasks)


def lm_eval_hash(name: str, splits: dict[str, list[Row]], shots: int) -> str:
    """Returns the task hash that lm-eval computes over these rows."""
    import datasets
    from lm_eval.utils import handle_non_serializable, hash_string

    from tests.parity.local_tasks import task_manager

    def load(*_: Any, **__: Any) -> Any:
        given = dict(splits)
        for split in ("train", "validation", "test"):  # the task's file names these splits, but no request needs them
            given.setdefault(split, next(iter(splits.values()))[:1])
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in given.items()})

    real, datasets.load_dataset = datasets.load_dataset, load
    try:
        task = task_manager().load(name)["tasks"][name]
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
    finally:
        datasets.load_dataset = real
    firsts = {instance.doc_id: instance for instance in task.instances if instance.idx == 0}
    parts = []
    for doc_id in sorted(firsts):
        doc = firsts[doc_id].doc
        written = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        hashed = (written, firsts[doc_id].args[0], str(task.doc_to_target(doc)))
        parts += [hash_string(text) for text in hashed]
    return hashlib.sha256("".join(parts * len(task._filters)).encode()).hexdigest()


def main() -> None:
    import os

    data = Path(os.environ["EVALENGINE_DATA"])
    hashes = {name: lm_eval_hash(name, local_rows(data, name), shots) for _, name, shots in tasks()}
    HASHES.write_text(json.dumps({"lm-eval": version("lm-eval"), "hashes": hashes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
