"""A run as `compare`, `gate` and the report see it, wherever it was read from (`load.load_run`): its evidence, and when
it was made, under which id and by which command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evalengine.records.digest import merkle_root
from evalengine.records.evidence import TOKENS, is_bound
from evalengine.records.folder import RECORDS
from evalengine.records.lm_eval_file import results_files
from evalengine.records.manifest_data import Manifest
from evalengine.records.schema import RecordKey, read_endings, read_optional
from evalengine.util.command import PROGRAM
from evalengine.util.plain_files import read_json

Key = RecordKey
ScoreKey = tuple[str, str, str]  # task, metric, filter
Program = Literal["evalengine", "lm-eval", "evalengine in lm-eval", "an endpoint", "inspect_ai"]
# What a run without tokens was read from, by its identity's `harness`: (its program, the files in words).
FOREIGN: dict[str, tuple[Program, str]] = {
    "endpoint": ("an endpoint", "a folder of an endpoint's answers"),
    "inspect_ai": ("inspect_ai", "a log of inspect_ai"),
}

UNBOUND = "its files are not bound (its manifest does not list their hashes), so edits would pass unseen"


@dataclass(eq=False)  # not frozen: a run can have 56,000
class Item:
    """One request. What the source does not hold is None, or "" for a hash."""

    task: str
    doc_id: int
    request_index: int
    repeat: int
    kind: str  # generate_until | loglikelihood | loglikelihood_rolling
    leaf: str = ""  # hex digest leaf (`records.digest.leaf_hash`); lm-eval has none
    prompt_sha256: str = ""
    output_sha256: str = ""  # `records.schema.ids_sha256` of the output ids
    output_ids: list[int] | None = None  # None: a baseline or an lm-eval folder holds none
    logprobs: np.ndarray | None = None  # float32 [len(output_ids)]
    sum_logprob: float | None = None  # math.fsum of logprobs, or what the source says
    text: str | None = None
    truncated: int = 0  # tokens cut from the prompt's left

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
    # task -> documents that an endpoint rejected, and answers that are none, by `REJECTED` and `UNANSWERED`
    unanswered: dict[str, dict[str, int]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)  # a group's tasks and groups; none in older baselines
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
        """The files that a run of another program was read from."""
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
        """Whether it ran every document of its tasks, if it records that."""
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
class RunData:
    """A finished run with the texts that its files hold, and what is read from them where it is used; a baseline has
    none."""

    run: Run
    results: dict[str, Any]  # lm-eval's results file
    rows: Samples

    @cached_property
    def samples(self) -> dict[str, dict[int, list[dict[str, Any]]]]:
        """Task -> doc_id -> a sample per filter, documents in order."""
        samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for task, rows in self.rows.items():
            documents = samples.setdefault(task, {})
            for row in sorted(rows, key=lambda row: row["doc_id"]):  # the sort is stable, so filters stay in order
                documents.setdefault(row["doc_id"], []).append(row)
        return samples

    def _recorded(self, read: Any, file: str = RECORDS) -> dict[Any, Any]:
        """The content, by `read`, of a file next to the records; empty for a run of another program."""
        found: dict[Any, Any] = read((self.run.records or self.run.source) / file) if self.run.kind == "run" else {}
        return found

    @cached_property
    def endings(self) -> dict[Key, tuple[str, int]]:
        """Request -> (finish reason, prompt tokens)."""
        return self._recorded(read_endings)

    @cached_property
    def thinking(self) -> dict[Key, tuple[int, bool]]:
        """Request -> (tokens of its thinking, whether it was truncated), where the end of thinking is named."""
        found = self._recorded(lambda file: read_optional(file, "thinking_tokens", "thinking_truncated"))
        return {key: (count, bool(truncated)) for key, (count, truncated) in found.items()}

    @cached_property
    def outcomes(self) -> dict[Key, str]:
        """Request -> how the program in it ended, of tasks that run what the model wrote."""
        return {key: end for key, (end,) in self._recorded(lambda file: read_optional(file, "outcome")).items()}

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """Token id -> bytes; empty where the run left no tokens.json."""
        from evalengine.records.tokens import read_tokens

        return self._recorded(read_tokens, TOKENS)

    @property
    def tasks(self) -> list[str]:
        """The tasks with samples, in the results' order."""
        return [task for task in self.results["results"] if task in self.samples]

    @cached_property
    def documents(self) -> dict[tuple[str, int], list[Item]]:
        """Each document's requests by (task, doc_id), in order; none for a document with an empty text."""
        requests: dict[tuple[str, int], list[Item]] = {(t, doc): [] for t, docs in self.samples.items() for doc in docs}
        for item in self.run.items.values():
            requests[item.task, item.doc_id].append(item)
        return requests

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Each task's kind of request; tasks without a request are missing."""
        return {item.task: item.kind for item in self.run.items.values()}

    def score_keys(self, task: str) -> list[ScoreKey]:
        """The task's metrics that have a number per document, those of the results first and in their order."""
        reported = [key for key in self.run.results if key[0] == task and key in self.run.scores]
        return reported + sorted(key for key in self.run.scores if key[0] == task and key not in reported)

    def binary(self, key: ScoreKey) -> bool:
        """Whether every document scored 0 or 1; False for a metric without a score per document."""
        return key in self.run.scores and set(self.run.scores[key].values()) <= {0.0, 1.0}


def tree_digests(items: Mapping[Key, Item]) -> dict[str, str]:
    """Each task's digest (`records.digest.Digests`) from the leaves of items in key order."""
    return {
        task: merkle_root([bytes.fromhex(item.leaf) for item in group]).hex()
        for task, group in groupby(items.values(), key=lambda item: item.task)
    }


def by_name(key: ScoreKey) -> dict[str, str]:
    """A metric's key as files for other programs have it."""
    return dict(zip(("task", "metric", "filter"), key, strict=True))


def key_name(key: ScoreKey) -> str:
    """A metric's name for people: `gsm8k exact_match strict-match`."""
    return " ".join(part for part in key if part not in ("none", ""))


def direction(runs: Iterable[Run], key: ScoreKey) -> bool | None:
    """Whether more of a metric is better, as the first run that knows says; None where none does."""
    return next((run.higher_is_better[key] for run in runs if key in run.higher_is_better), None)


@dataclass(frozen=True)
class Provenance:
    """A run's origin; None where the run does not say: lm-eval records no command, a run from Python has none."""

    started: datetime | None  # in UTC
    run_id: str | None
    command: str | None  # as a shell takes it

    @property
    def date(self) -> str:
        """When the run began, `2026-01-02 03:04 UTC`; "" where that is not known."""
        return "" if self.started is None else f"{self.started:%Y-%m-%d %H:%M} UTC"


def provenance(run: Run) -> Provenance:
    """The provenance of a run folder, an lm-eval folder or a baseline. Runs from before manifests held the date have it
    in their results file, as lm-eval's runs do."""
    started = parsed(run.manifest.started)
    if started is None and run.kind != "baseline":
        with suppress(OSError, ValueError, IndexError, AttributeError):
            started = parsed(read_json(results_files(run.source)[-1]).get("date"))
    run_id = run.manifest.run_id
    return Provenance(started, run_id[:40] if run_id else None, command_line(run.manifest.command))


def parsed(value: Any) -> datetime | None:
    """A manifest's `started` (text), or lm-eval's `date` (UNIX seconds); None for anything else."""
    try:
        if isinstance(value, str):
            return datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return datetime.fromtimestamp(value, timezone.utc)
    except (ValueError, OverflowError, OSError):  # a number beyond 9999-12-31 is no date
        pass
    return None


def command_line(words: Any) -> str | None:
    """The command `python -m evalengine` with these words, as a shell takes it; None if they are no list of texts."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return " ".join([PROGRAM, *map(shlex.quote, words)])
