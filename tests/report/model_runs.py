"""Runs of made-up models for the tests of their comparison: nothing in them matters but the documents' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalengine.records.manifest_data import Manifest
from evalengine.report.read.run import Item, Key, Run

ScoresOfTasks = Mapping[str, Sequence[float]]


def model(
    name: str,
    scores: ScoresOfTasks,
    metric: str = "acc",
    docs: Mapping[str, Sequence[str]] | None = None,
    prompts: str = "p",
    better: bool | None = True,
    **identity: Any,
) -> Run:
    """A run of the model `name`. docs: task -> the documents' hashes (default: d0, d1, ...)."""
    hashes = {task: (docs or {}).get(task, [f"d{n}" for n in range(len(values))]) for task, values in scores.items()}
    return Run(
        source=Path(f"results/{name}"),
        kind="run",
        name=name,
        digest=f"{abs(hash(name)):064x}"[:64],
        task_digests={},
        identity={"weights": name.ljust(64, "w"), "tasks": {task: {"version": 1.0} for task in scores}, **identity},
        manifest=Manifest({"model": {"name": name, "source": f"models/{name}"}, "run_id": name[:8], "files": {}}),
        items={key: item for task, values in scores.items() for key, item in _items(task, len(values))},
        scores={(task, metric, "none"): dict(enumerate(values)) for task, values in scores.items()},
        results={(task, metric, "none"): (sum(values) / len(values), None) for task, values in scores.items()},
        higher_is_better={} if better is None else {(task, metric, "none"): better for task in scores},
        answers={},
        hashes={
            task: {n: (hashed, f"{prompts}{hashed}", f"t{hashed}") for n, hashed in enumerate(doc_hashes)}
            for task, doc_hashes in hashes.items()
        },
    )


def rolling(name: str, sums: Sequence[Sequence[float]], perplexity: float) -> Run:
    """A run of a rolling task `pages`. sums: the log-likelihoods of each document's windows; perplexity: what the
    results say."""
    base = model(name, {"pages": [0.0] * len(sums)})
    items = {
        ("pages", doc, window, 0): _item(("pages", doc, window, 0), "loglikelihood_rolling", value)
        for doc, values in enumerate(sums)
        for window, value in enumerate(values)
    }
    keys = [("pages", metric, "none") for metric in ("word_perplexity", "bits_per_byte")]
    results = dict.fromkeys(keys, (perplexity, None))
    fields: dict[str, Any] = {**base.__dict__, "items": items, "scores": {}, "results": results}
    return Run(**{**fields, "higher_is_better": dict.fromkeys(keys, False)})


def _items(task: str, count: int) -> list[tuple[Key, Item]]:
    keys = [(task, doc, 0, 0) for doc in range(count)]
    return [(key, _item(key, "generate_until", -1.0)) for key in keys]


def _item(key: Key, kind: str, value: float) -> Item:
    return Item(*key, kind, "", "", "", None, None, value, None, 0)
