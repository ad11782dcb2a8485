"""`manifest.json` and `identity.json` as they are read: whatever is wrong with them is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest
from evalengine.records.shapes import Each, anything, count, number, sha256, text, truth, wrong
from evalengine.util.plain_files import read_json

_IDENTITY = {
    "numerics?": text,
    "dtype?": text,
    "weights?": text,
    "tokenizer?": anything,  # compared, field by field; a hash alone in the manifests of older versions
    "tasks?": Each({"generation?": {"temperature?": number}}),
    "datasets?": Each({"sha256?": text}),
}
# What every reader relies on. A page needs more (`PAGE`).
_MANIFEST = {
    "digest": sha256,
    "task_digests": Each(sha256),
    "identity": _IDENTITY,
    "run_id?": text,
    "started?": text,  # "2026-01-02T03:04:05Z"; as the command, not in the manifests of older versions
    "command?": [text],
    "numerics?": text,
    "model?": {"name?": text},
    "engine?": Each(anything),
    "code?": {"commit?": text},
    "counts?": {"requests?": count, "resumed_requests?": count, "cached_requests?": count},
    "cache?": Each(anything),
    "timings?": Each(number),
    "programs?": {"isolated": truth, "outcomes": Each(Each(count))},
}
_COUNTS = ("documents", "requests", "resumed_requests", "truncated_prompts", "prompt_tokens", "output_tokens")
_STATS = ("num_steps", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "largest_batch", "largest_step")
PAGE = {
    "contract_version": number,
    "numerics": text,
    "python": text,
    "model": {"name": text, "architecture": text, "num_parameters": count, "format": text, "weights_sha256": text},
    "datasets": Each({"rows?": count}),
    "engine": {"dtype": text, "device": text, "stats?": dict.fromkeys(_STATS, count)},
    "counts": dict.fromkeys(_COUNTS, count),
    "timings": dict.fromkeys(("load_seconds", "run_seconds", "total_seconds"), number),
    "code": {"version": text, "commit?": text, "dirty?": truth},
    "hardware": {"device": text, "cpu": text, "cpu_count?": count, "gpus": [text]},
    "libraries": Each(text),
}


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
    if problem := wrong(identity, {"run_id": text}):
        raise ValueError(problem)
    return dict(identity)


def missing_for_page(manifest: Manifest) -> str:
    """What a page needs of a run's manifest and this one lacks, in words; "" if nothing."""
    return wrong(manifest.content, PAGE)
