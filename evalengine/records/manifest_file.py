"""`manifest.json` and `identity.json` as they are read: whatever is wrong with them is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest
from evalengine.records.shapes import Count, Flag, Number, Sha256, Text, each, with_fields, wrong
from evalengine.util.plain_files import read_json

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
