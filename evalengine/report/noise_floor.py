"""Fast mode against an invariant one on the same inputs: how much of a result the arithmetic alone moves."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from evalengine.records.folder import DIGEST
from evalengine.records.manifest import MANIFEST
from evalengine.report.comparability import incomparable
from evalengine.report.divergence import LogprobChange, logprob_change
from evalengine.report.runs import Run, ScoreKey, load_run, merkle_differences

SIBLINGS = 200  # newest run folders looked at


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
    answers: int  # documents whose generated answer differs under some filter
    documents: int
    logprobs: LogprobChange | None  # over tokens that both runs share
    metrics: list[MetricNoise]


def is_pair(a: Run, b: Run) -> bool:
    """Whether one of two comparable runs of ours is fast and the other is not."""
    levels = [run.manifest.get("numerics") for run in (a, b)]
    return None not in levels and (levels[0] == "fast") != (levels[1] == "fast") and not incomparable(a, b)


def noise_floor(a: Run, b: Run) -> NoiseFloor:
    """The two runs of a pair (`is_pair`), in either order."""
    invariant, fast = (b, a) if a.manifest["numerics"] == "fast" else (a, b)
    keys = [key for key in merkle_differences(invariant, fast) if key in invariant.items and key in fast.items]
    pairs = [(invariant.items[key], fast.items[key]) for key in keys]
    common = invariant.results.keys() & fast.results.keys()
    return NoiseFloor(
        invariant=invariant,
        fast=fast,
        requests=len(invariant.items.keys() & fast.items.keys()),
        differing=len(keys),
        outputs=sum(x.output_sha256 != y.output_sha256 for x, y in pairs),
        answers=len(_other_answers(invariant, fast)),
        documents=len({key[:2] for key in invariant.items} & {key[:2] for key in fast.items}),
        logprobs=logprob_change(pairs),
        metrics=[_metric(invariant, fast, key) for key in invariant.results if key in common],
    )


def sibling(run: Run) -> Run | None:
    """The newest finished run beside this one that makes a pair with it; None if there is none."""
    level = run.manifest.get("numerics")
    if run.kind != "run" or level is None:
        return None
    folders = [path.parent for path in run.source.resolve().parent.glob(f"*/{DIGEST}")]
    for folder in sorted(folders, key=lambda path: (path / DIGEST).stat().st_mtime_ns, reverse=True)[:SIBLINGS]:
        if folder != run.source.resolve() and _alike(folder, run):
            other = load_run(folder)
            if is_pair(run, other):
                return other
    return None


def _alike(folder: Path, run: Run) -> bool:
    """Whether a folder's manifest promises a pair; a look at a few kB saves reading the run."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        other = manifest["identity"]
        same = all(other.get(name) == run.identity.get(name) for name in ("weights", "tokenizer", "prompts", "tasks"))
        return bool(same and (manifest["numerics"] == "fast") != (run.manifest["numerics"] == "fast"))
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False


def _other_answers(a: Run, b: Run) -> set[tuple[str, int]]:
    """Documents of generating tasks whose answer differs under some filter."""
    generated = {item.task for item in a.items.values() if item.kind == "generate_until"}
    return {
        (task, doc)
        for (task, name), answers in a.answers.items()
        if task in generated
        for doc, answer in answers.items()
        if b.answers.get((task, name), {}).get(doc, answer) != answer
    }


def _metric(a: Run, b: Run, key: ScoreKey) -> MetricNoise:
    x, y = a.scores.get(key, {}), b.scores.get(key, {})
    pairs = [(x[doc], y[doc]) for doc in x.keys() & y.keys() if math.isfinite(x[doc]) and math.isfinite(y[doc])]
    gained, lost = sum(v > u for u, v in pairs), sum(v < u for u, v in pairs)
    return MetricNoise(key, a.results[key][0], b.results[key][0], gained, lost, len(pairs))
