"""A run's `manifest.json` as readers have it: attributes over the file's JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
