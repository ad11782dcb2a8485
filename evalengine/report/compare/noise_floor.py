"""Fast mode against an invariant one on the same inputs: how much of a result the arithmetic alone moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.plain_files import read_json
from evalengine.records.folder import DIGEST
from evalengine.records.manifest import MANIFEST
from evalengine.records.manifest_file import missing_for_page
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.divergence import LogprobChange, logprob_change
from evalengine.report.compare.flips import changed_documents, flips, score_unchanged
from evalengine.report.compare.item_differences import differing_leaves
from evalengine.report.read.load import load_run
from evalengine.report.read.places import SWEEP_PLACE
from evalengine.report.read.run import Run, ScoreKey

SIBLINGS = 200  # newest run folders looked at
SCHEDULE = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "num_threads", "device")


@dataclass(frozen=True)
class MetricNoise:
    """One metric in both runs. Units are the metric's."""

    key: ScoreKey
    invariant: float
    fast: float
    gained: int  # documents that score higher in fast mode
    lost: int
    documents: int  # scored in both


@dataclass(frozen=True, eq=False)
class NoiseFloor:
    """What separates a fast run from an invariant one."""

    invariant: Run
    fast: Run
    requests: int
    differing: int  # requests whose bits differ
    outputs: int  # of those, whose tokens differ
    answers: int  # documents that flip: another answer or another score under some filter (`flips`)
    alone: str  # how many of those have the score that they had, in words; "" if none has
    documents: int
    compared: int  # logprobs of tokens that both runs share
    logprobs: LogprobChange | None  # over those of the requests that differ; None if none does
    metrics: list[MetricNoise]


def is_pair(a: Run, b: Run) -> bool:
    """Whether one of two comparable runs of ours is fast and the other is not."""
    levels = [run.manifest.get("numerics") for run in (a, b)]
    if any(missing_for_page(run.manifest) for run in (a, b)):
        return False
    return None not in levels and (levels[0] == "fast") != (levels[1] == "fast") and not incomparable(a, b)


def noise_floor(a: Run, b: Run) -> NoiseFloor:
    """The two runs of a pair (`is_pair`), in either order."""
    invariant, fast = (b, a) if a.manifest["numerics"] == "fast" else (a, b)
    keys = [key for key in differing_leaves(invariant, fast) if key in invariant.items and key in fast.items]
    pairs = [(invariant.items[key], fast.items[key]) for key in keys]
    change = logprob_change(pairs)
    differing = {*keys}
    equal = (i.logprobs for key, i in fast.items.items() if key in invariant.items and key not in differing)
    common = invariant.results.keys() & fast.results.keys()
    flipped = [*flips(invariant, fast, {})]
    return NoiseFloor(
        invariant=invariant,
        fast=fast,
        requests=len(invariant.items.keys() & fast.items.keys()),
        differing=len(keys),
        outputs=sum(x.output_sha256 != y.output_sha256 for x, y in pairs),
        answers=sum(changed_documents(flipped).values()),
        alone=score_unchanged(flipped),
        documents=len({key[:2] for key in invariant.items} & {key[:2] for key in fast.items}),
        compared=sum(map(_length, equal)) + (change.compared if change else 0),
        logprobs=change,
        metrics=[_metric(invariant, fast, key) for key in invariant.results if key in common],
    )


def sibling(run: Run) -> Run | None:
    """The finished run beside this one, or in its experiment, that makes a pair with it; None if there is none.

    Of several, one under the same engine settings (an experiment sweeps them), and of those the newest. A damaged one
    is passed over.
    """
    if run.kind != "run" or run.manifest.get("numerics") is None:
        return None
    here = run.source.resolve()
    newest = sorted(_neighbours(here), key=lambda path: (path / DIGEST).stat().st_mtime_ns, reverse=True)[:SIBLINGS]
    found = [(folder, manifest) for folder in newest if (manifest := _alike(folder, run)) is not None]
    settings = _schedule(run.manifest)
    for folder, _ in sorted(found, key=lambda pair: _schedule(pair[1]) != settings):  # stable: the newest first
        try:
            other = load_run(folder)
        except ConfigError:
            continue
        if is_pair(run, other):
            return other
    return None


def _neighbours(here: Path) -> set[Path]:
    """Finished runs in the folder that holds this one; of an experiment (`1-<settings>/<run>`), in its others too."""
    files = {*here.parent.glob(f"*/{DIGEST}")}
    if SWEEP_PLACE.fullmatch(here.parent.name):
        files |= {file for file in here.parent.parent.glob(f"*/*/{DIGEST}") if SWEEP_PLACE.fullmatch(file.parts[-3])}
    return {file.parent for file in files} - {here}


def _alike(folder: Path, run: Run) -> dict[str, Any] | None:
    """A folder's manifest if it promises a pair; a look at a few kB saves reading the run."""
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST)
        other = manifest["identity"]
        same = all(other.get(name) == run.identity.get(name) for name in ("weights", "tokenizer", "prompts", "tasks"))
        return manifest if same and (manifest["numerics"] == "fast") != (run.manifest["numerics"] == "fast") else None
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return None


def _schedule(manifest: dict[str, Any]) -> list[Any]:
    """The settings that an experiment sweeps, and that a fast run's bits hang on."""
    engine = manifest.get("engine")
    return [engine.get(name) for name in SCHEDULE] if isinstance(engine, dict) else []


def _length(logprobs: np.ndarray | None) -> int:
    return 0 if logprobs is None else len(logprobs)


def _metric(a: Run, b: Run, key: ScoreKey) -> MetricNoise:
    x, y = a.scores.get(key, {}), b.scores.get(key, {})
    pairs = [(x[doc], y[doc]) for doc in x.keys() & y.keys() if math.isfinite(x[doc]) and math.isfinite(y[doc])]
    gained, lost = sum(v > u for u, v in pairs), sum(v < u for u, v in pairs)
    return MetricNoise(key, a.results[key][0], b.results[key][0], gained, lost, len(pairs))
