"""Small runs built by hand, for the gate's tests to vary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalengine.records.digest import merkle_root
from evalengine.records.manifest_data import Manifest
from evalengine.report.gate import gate as gate_module
from evalengine.report.gate.gate import gate
from evalengine.report.gate.report import Report
from evalengine.report.read.run import Item, Key, Run

METRIC = ("exact_match", "strict-match")
RIGHT = [1.0] * 80 + [0.0] * 20


def item(task: str, doc: int, output: str = "same", total: float | None = -1.5) -> Item:
    """A generation of the document, whose hashes follow from the arguments."""
    leaf = hashlib.sha256(f"{task}{doc}{output}{total}".encode()).hexdigest()
    ids = hashlib.sha256(f"{task}{doc}{output}".encode()).hexdigest()
    prompt = hashlib.sha256(f"{task}{doc}".encode()).hexdigest()
    return Item(task, doc, 0, 0, "generate_until", leaf, prompt, ids, None, None, total, None, 0)


def make_run(
    scores: Mapping[str, Sequence[float]], items: Sequence[Item] = (), total: float = -1.5, **identity: Any
) -> Run:
    """A baseline. scores: task -> the documents' scores; `items` replace the made-up items of the same request, whose
    logprobs sum to `total`: runs of other totals have no equal bits."""
    by_key: dict[Key, Item] = {}
    for entry in (*(item(task, doc, total=total) for task in scores for doc in range(len(scores[task]))), *items):
        by_key[entry.key] = entry
    leaves = {task: [bytes.fromhex(by_key[key].leaf) for key in sorted(by_key) if key[0] == task] for task in scores}
    return Run(
        source=Path("baseline.json"),
        kind="baseline",
        name="baseline",
        digest=merkle_root([leaf for task in sorted(scores) for leaf in leaves[task]]).hex(),
        task_digests={task: merkle_root(leaves[task]).hex() for task in sorted(scores)},
        identity={"weights": "w", "tokenizer": "t", "numerics": "exact", "dtype": "float32", "seed": 0, **identity},
        manifest=Manifest({}),
        items=dict(sorted(by_key.items())),
        scores={(task, *METRIC): dict(enumerate(values)) for task, values in scores.items()},
        results={(task, *METRIC): (sum(values) / len(values), None) for task, values in scores.items()},
        higher_is_better={(task, *METRIC): True for task in scores},
        answers={(task, METRIC[1]): {doc: str(v) for doc, v in enumerate(scores[task])} for task in scores},
        hashes={},
    )


def judge(monkeypatch: pytest.MonkeyPatch, a: Run, b: Run, policy: str) -> Report:
    """The gate's report on run B against baseline A, under a policy by name or file."""
    monkeypatch.setattr(gate_module, "load_run", {"a": a, "b": b}.__getitem__)
    return gate("a", "b", policy)
