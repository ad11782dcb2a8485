"""A run's `manifest.json` as readers have it: attributes over the file's JSON object. And how it and `identity.json`
are read: whatever is wrong with them is one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.manifest_parts import (
    CacheUse,
    Cluster,
    Code,
    Dataset,
    EngineSetup,
    Hardware,
    Judged,
    Model,
    Programs,
    RunCounts,
    RunTimings,
    read_fields,
)
from evalengine.records.shapes import Count, Flag, Number, Sha256, Text, each, with_fields, wrong
from evalengine.util.plain_files import read_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a run ran on, and how it went. Of what is not recorded, `manifest_parts` says how it reads."""

    content: dict[str, Any]  # the JSON object, with what newer versions add; empty where a run has no manifest
    run_id: str | None = field(init=False)
    started: str | None = field(init=False)  # "2026-01-02T03:04:05Z"; older versions recorded no start and no command
    command: list[str] | None = field(init=False)  # the words after `python -m evalengine`; None if Python started it
    digest: str = field(init=False)
    task_digests: dict[str, str] = field(init=False)
    contract_version: float | None = field(init=False)
    numerics: str | None = field(init=False)  # exact | native | fast
    identity: dict[str, Any] = field(init=False)  # what `run_identity` gives: plain JSON values, compared one by one
    model: Model = field(init=False)
    datasets: dict[str, Dataset] = field(init=False)  # task -> its rows; lm-eval loads its own, and records none
    engine: EngineSetup = field(init=False)
    counts: RunCounts = field(init=False)
    timings: RunTimings = field(init=False)
    programs: Programs | None = field(init=False)  # None where no task runs what the model wrote
    cache: CacheUse | None = field(init=False)  # None where the run had no cache of answers
    judge: Judged | None = field(init=False)  # None where no judge scored the answers
    cluster: Cluster | None = field(init=False)  # None where one engine answered
    code: Code = field(init=False)
    hardware: Hardware = field(init=False)  # with replicas, the first one's
    python: str = field(init=False)
    libraries: dict[str, str] = field(init=False)  # package -> version
    files: dict[str, str] | None = field(init=False)  # name -> SHA-256 of every other file of the run (`evidence`)
    sha256: str | None = field(init=False)  # SHA-256 of the manifest without this field

    def __post_init__(self) -> None:
        for name, value in read_fields(Manifest, {**self.content, "content": self.content}).items():
            object.__setattr__(self, name, value)  # the fields are frozen for everybody else

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self.content)

    @property
    def from_cache(self) -> int:
        """How many answers were read from a cache and not computed again."""
        return 0 if self.cache is None else self.cache.hits - self.cache.audited

    @property
    def output_kind(self) -> str:
        """What the output tokens are: "scored" where the model was only given them, else "output"."""
        stats = self.engine.stats
        return "scored" if stats is not None and stats.num_generated_tokens == 0 else "output"

    @property
    def unsealed(self) -> dict[str, Any]:
        """What `sha256` is the hash of."""
        return {name: value for name, value in self.content.items() if name != "sha256"}

    @property
    def engine_settings(self) -> dict[str, Any]:
        """All settings of the engine by name, as they were resolved."""
        part = self.content.get("engine")
        items = part.items() if isinstance(part, Mapping) else ()
        return {name: value for name, value in items if name not in ("stats", "kernels", "self_test_verdict")}

    def file_text(self) -> str:
        """`manifest.json`: every run's is written so."""
        return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"


def not_run(counts: RunCounts) -> int:
    """How many of a manifest's requests its run did not compute: from an interrupted run, or read from a cache."""
    return counts.resumed_requests + counts.cached_requests


def resumed_fast(manifest: Manifest) -> int:
    """Of a run whose numerics are fast: how many requests it took from an interrupted one; 0 for any other run.

    The rest ran in other batches than an unbroken run's, and fast numerics' bits depend on the batch: the same command
    gives these bits never again.
    """
    return manifest.counts.resumed_requests if manifest.numerics == "fast" else 0


def credit_words(manifest: Manifest) -> str:
    """How a run scored texts whose thinking did not end. One from before there was the setting scored them."""
    scored = manifest.identity.get("score_unfinished_thinking", True)
    return "scored as if they were answers" if scored else "no credit"


_IDENTITY = with_fields(
    {
        "numerics?": Text,
        "dtype?": Text,
        "weights?": Text,
        "tokenizer?": Any,  # compared, field by field; a hash alone in the manifests of older versions
        "tasks?": each(with_fields({"generation?": with_fields({"temperature?": Number})})),
        "datasets?": each(with_fields({"sha256?": Text})),
    }
)
# What every reader relies on. A page needs more (`PAGE`).
_MANIFEST = with_fields(
    {
        "digest": Sha256,
        "task_digests": dict[str, Sha256],
        "identity": _IDENTITY,
        "run_id?": Text,
        "started?": Text,  # "2026-01-02T03:04:05Z"; as the command, not in the manifests of older versions
        "command?": list[Text],
        "numerics?": Text,
        "model?": with_fields({"name?": Text}),
        "engine?": dict,
        "code?": with_fields({"commit?": Text}),
        "counts?": with_fields({"requests?": Count, "resumed_requests?": Count, "cached_requests?": Count}),
        "cache?": dict,
        "timings?": dict[str, Number],
        "programs?": with_fields({"isolated": Flag, "outcomes": dict[str, dict[str, Count]]}),
    }
)
_COUNTS = ("documents", "requests", "resumed_requests", "truncated_prompts", "prompt_tokens", "output_tokens")
_STATS = ("num_steps", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "largest_batch", "largest_step")
_MODEL = ("name", "architecture", "format", "weights_sha256")
_BEGUN = with_fields({"run_id": Text})
PAGE = with_fields(
    {
        "contract_version": Number,
        "numerics": Text,
        "python": Text,
        "model": with_fields({**dict.fromkeys(_MODEL, Text), "num_parameters": Count}),
        "datasets": each(with_fields({"rows?": Count})),
        "engine": with_fields({"dtype": Text, "device": Text, "stats?": with_fields(dict.fromkeys(_STATS, Count))}),
        "counts": with_fields(dict.fromkeys(_COUNTS, Count)),
        "timings": with_fields(dict.fromkeys(("load_seconds", "run_seconds", "total_seconds"), Number)),
        "code": with_fields({"version": Text, "commit?": Text, "dirty?": Flag}),
        "hardware": with_fields({"device": Text, "cpu": Text, "cpu_count?": Count, "gpus": list[Text]}),
        "libraries": dict[str, Text],
    }
)


def load_manifest(path: Path, cure: str) -> Manifest:
    """`manifest.json`. Raises `ConfigError` if it is missing or is no manifest."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: missing or damaged ({error}); {cure}") from error
    if problem := wrong(content, _MANIFEST):
        raise ConfigError(f"{path}: not the manifest of a run ({problem}); {cure}")
    return Manifest(content)


def glance_at_manifest(path: Path) -> Manifest:
    """`manifest.json` before anybody has checked it, for who chooses among many runs. Raises OSError if it cannot be
    read, ValueError if it is no JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return Manifest(content)


def read_identity(path: Path) -> dict[str, Any]:
    """`identity.json` of an unfinished run. Raises ValueError if it is none, OSError if it cannot be read."""
    identity = read_json(path)
    if problem := wrong(identity, _BEGUN):
        raise ValueError(problem)
    return dict(identity)


def missing_for_page(manifest: Manifest) -> str:
    """What a page needs of a run's manifest and this one lacks, in words; "" if nothing."""
    return wrong(manifest.content, PAGE)
