"""A run that tells a setting from a schedule: with B's settings and A's schedule, beside either of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.manifest import MANIFEST
from evalengine.records.manifest_data import Manifest
from evalengine.records.manifest_file import glance_at_manifest
from evalengine.report.read.load import load_run
from evalengine.report.read.places import runs_below
from evalengine.report.read.run import Run


def second_run(a: Run, b: Run) -> Run | None:
    """The newest finished run with B's identity and A's schedule in the folders that hold A and B; None if there is
    none, or if it cannot be read."""
    wanted = (b.identity, _schedule(a.manifest))
    for folder in _candidates({a.source.parent, b.source.parent}):
        try:
            manifest = glance_at_manifest(folder / MANIFEST)
            if (manifest.identity, _schedule(manifest)) == wanted:
                return load_run(folder)
        except (OSError, ValueError, ConfigError):
            continue
    return None


def _candidates(roots: set[Path]) -> Iterator[Path]:
    folders = [folder for root in roots if root.is_dir() for folder in runs_below(root)]
    yield from sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)


def _schedule(manifest: Manifest) -> dict[str, Any]:
    """The engine's settings as they ran, without what it counted."""
    return {name: value for name, value in (manifest.content.get("engine") or {}).items() if name != "stats"}
