"""A run as `compare`, `gate` and the report see it, wherever it was read from (`load.load_run`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evalengine.records.evidence import is_bound
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import RecordKey

Key = RecordKey
ScoreKey = tuple[str, str, str]  # task, metric, filter
Program = Literal["evalengine", "lm-eval", "evalengine in lm-eval", "an endpoint", "inspect_ai"]
# What a run without tokens was read from, by its identity's `harness`: (its program, the files in words).
FOREIGN: dict[str, tuple[Program, str]] = {
    "endpoint": ("an endpoint", "a folder of an endpoint's answers"),
    "inspect_ai": ("inspect_ai", "a log of inspect_ai"),
}

UNBOUND = "its files are not bound (its manifest does not list their hashes), so edits would pass unseen"


@dataclass(eq=False)  # not frozen, as `RequestRecord`
class Item:
    """One request. What the source does not hold is None, or "" for a hash."""

    task: str
    doc_id: int
    request_index: int
    repeat: int
    kind: str  # generate_until | loglikelihood | loglikelihood_rolling
    leaf: str  # hex digest leaf (`records.digest.leaf_hash`); "" where unknown (lm-eval)
    prompt_sha256: str
    output_sha256: str  # `records.schema.ids_sha256` of the output ids
    output_ids: list[int] | None  # None: a baseline or an lm-eval folder holds none
    logprobs: np.ndarray | None  # float32 [len(output_ids)]
    sum_logprob: float | None  # math.fsum of logprobs, or what the source says
    text: str | None
    truncated: int  # tokens cut from the prompt's left

    @property
    def key(self) -> Key:
        return (self.task, self.doc_id, self.request_index, self.repeat)


Samples = dict[str, list[dict[str, Any]]]  # task -> rows of its samples file, in its order


@dataclass(frozen=True, eq=False)
class Run:
    """A run as evidence. Scores and answers are lm-eval's: a document's value under a filter."""

    source: Path
    kind: Literal["run", "baseline", "lm-eval"]
    name: str  # short label for tables
    digest: str | None
    task_digests: dict[str, str]
    identity: dict[str, Any]  # `manifest.identity`; of lm-eval: what its results say about model, tasks and prompts
    manifest: Manifest  # an empty one where there is none
    items: dict[Key, Item]  # in key order
    scores: dict[ScoreKey, dict[int, float]]  # doc_id -> value
    results: dict[ScoreKey, tuple[float, float | None]]  # aggregated value, standard error
    higher_is_better: dict[ScoreKey, bool]  # absent where the source does not say
    answers: dict[tuple[str, str], dict[int, str]]  # (task, filter) -> doc_id -> filtered answer as text
    hashes: dict[str, dict[int, tuple[str, str, str]]]  # task -> doc_id -> (doc_hash, prompt_hash, target_hash)
    choices: dict[ScoreKey, dict[int, int]] = field(default_factory=dict)  # doc_id -> number of the choice
    choice_texts: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)  # task -> doc_id -> choices
    # (log-likelihood, weight) of each document, for metrics computed from those sums: perplexities by word or byte
    weighted: dict[ScoreKey, dict[int, tuple[float, float]]] = field(default_factory=dict)
    clusters: dict[str, dict[int, str]] = field(default_factory=dict)  # task -> doc_id -> what related documents share
    cut: dict[str, frozenset[int]] = field(
        default_factory=dict
    )  # task -> documents with a generation that a limit ended
    groups: dict[str, list[str]] = field(default_factory=dict)  # a group's tasks and groups; none in a baseline
    records: Path | None = None  # the folder of its records and manifest, where that is not `source`

    @property
    def program(self) -> Program:
        """The program that ran it; two programs record unlike settings. Of "evalengine in lm-eval" the tasks are
        lm-eval's and the engine is ours."""
        if self.by_lm_eval:
            return FOREIGN.get(str(self.identity.get("harness")), ("lm-eval", ""))[0]
        return "evalengine in lm-eval" if self.identity.get("harness") == "lm-eval" else "evalengine"

    @property
    def files(self) -> str:
        """What a run of another program was read from."""
        return FOREIGN.get(str(self.identity.get("harness")), ("", "an lm-eval folder"))[1]

    @property
    def by_lm_eval(self) -> bool:
        """Whether lm-eval ran it, or its files are like lm-eval's: an endpoint's answers, a log of
        inspect_ai. For a baseline the digest tells: every run of ours has one, no run of lm-eval's."""
        return self.kind == "lm-eval" or (self.kind == "baseline" and self.digest is None)

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.source if self.source.is_dir() else self.source.parent

    @property
    def asks_all(self) -> bool:
        """Whether it asked every document of its tasks, as far as it says."""
        return "limit" in self.identity and self.identity["limit"] is None

    @property
    def model_args(self) -> dict[str, Any]:
        """lm-eval's arguments of the model by name; it writes them as a mapping, or as `pretrained=...,dtype=...`."""
        arguments = self.identity.get("model_args")
        if isinstance(arguments, str):
            return {name: value for name, _, value in (part.partition("=") for part in arguments.split(","))}
        return dict(arguments) if isinstance(arguments, Mapping) else {}

    @property
    def unbound(self) -> bool:
        """Whether it is a folder of ours whose manifest does not list its files: edits of them would pass unseen."""
        return self.kind == "run" and not is_bound(self.manifest)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A run, and the newest files in lm-eval's form that it was read from; a baseline has none."""

    run: Run
    results: dict[str, Any]
    samples: Samples
    endings: dict[Key, tuple[str, int]] | None = None  # of a run folder of ours: (finish reason, prompt tokens)


def direction(runs: Iterable[Run], key: ScoreKey) -> bool | None:
    """Whether more of a metric is better, as the first run that knows says; None where none does."""
    return next((run.higher_is_better[key] for run in runs if key in run.higher_is_better), None)
