"""Fast mode against an invariant mode on the same inputs: how far the arithmetic alone moves a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.folder import DIGEST
from evalengine.records.manifest import MANIFEST
from evalengine.records.manifest_data import Manifest
from evalengine.records.manifest_file import glance_at_manifest, missing_for_page
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.compare import compare
from evalengine.report.compare.distance import Distance
from evalengine.report.read.load import load_run
from evalengine.report.read.places import SWEEP_PLACE
from evalengine.report.read.run import Run

SIBLINGS = 200  # how many run folders are looked at, the newest first
SCHEDULE = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "num_threads", "device")


def is_pair(a: Run, b: Run) -> bool:
    """Whether one of two comparable runs of ours is fast and the other is not."""
    levels = [run.manifest.numerics for run in (a, b)]
    if any(missing_for_page(run.manifest) for run in (a, b)):
        return False
    return None not in levels and (levels[0] == "fast") != (levels[1] == "fast") and not incomparable(a, b)


def noise_floor(a: Run, b: Run) -> Distance:
    """How far the runs of a pair (`is_pair`) lie apart, given in either order: A is the invariant one, B the fast."""
    invariant, fast = (b, a) if a.manifest.numerics == "fast" else (a, b)
    return Distance(compare(invariant, fast))


def sibling(run: Run) -> Run | None:
    """The finished run beside this one, or in the same experiment, that makes a pair with this run; None if none does.

    Of several, a run with the same engine settings (an experiment sweeps them) comes first, and of those the newest.
    Damaged runs are passed over.
    """
    if run.kind != "run" or run.manifest.numerics is None:
        return None
    here = run.source.resolve()
    newest = sorted(_neighbours(here), key=lambda path: (path / DIGEST).stat().st_mtime_ns, reverse=True)[:SIBLINGS]
    candidates = [(folder, manifest) for folder in newest if (manifest := _alike(folder, run)) is not None]
    settings = _schedule(run.manifest)
    for folder, _ in sorted(candidates, key=lambda pair: _schedule(pair[1]) != settings):  # ties stay newest first
        try:
            other = load_run(folder)
        except ConfigError:
            continue
        if is_pair(run, other):
            return other
    return None


def _neighbours(here: Path) -> set[Path]:
    """Finished runs beside this one; for a run of an experiment (`1-<settings>/<run>`), its other runs too."""
    files = {*here.parent.glob(f"*/{DIGEST}")}
    if SWEEP_PLACE.fullmatch(here.parent.name):
        files |= {file for file in here.parent.parent.glob(f"*/*/{DIGEST}") if SWEEP_PLACE.fullmatch(file.parts[-3])}
    return {file.parent for file in files} - {here}


def _alike(folder: Path, run: Run) -> Manifest | None:
    """A folder's manifest if it promises a pair; a look at a few kB saves reading the run."""
    try:
        manifest = glance_at_manifest(folder / MANIFEST)
        other = manifest.identity
        same = all(other.get(name) == run.identity.get(name) for name in ("weights", "tokenizer", "prompts", "tasks"))
        return manifest if same and (manifest.numerics == "fast") != (run.manifest.numerics == "fast") else None
    except (OSError, ValueError):
        return None


def _schedule(manifest: Manifest) -> list[Any]:
    """The settings that an experiment sweeps, and that a fast run's bits hang on."""
    engine = manifest.engine_settings
    return [engine.get(name) for name in SCHEDULE]
