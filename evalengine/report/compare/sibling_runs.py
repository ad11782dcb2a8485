"""The run next to another that is the same under the other kind of numerics: their distance is the noise floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.folder import DIGEST
from evalengine.records.manifest_data import MANIFEST, Manifest, glance_at_manifest, missing_for_page
from evalengine.report.compare.comparability import incomparable
from evalengine.report.read.load import load_run
from evalengine.report.read.names import SWEEP_PLACE
from evalengine.report.read.run import Run

SIBLINGS = 200  # how many run folders are looked at, the newest first
SCHEDULE = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "num_threads", "device")
SAME_INPUTS = ("weights", "tokenizer", "prompts", "tasks")


def is_pair(a: Run, b: Run) -> bool:
    """Whether one of two comparable runs of ours is fast and the other is not: their distance is the noise floor."""
    levels = [run.manifest.numerics for run in (a, b)]
    if any(missing_for_page(run.manifest) for run in (a, b)):
        return False
    return None not in levels and (levels[0] == "fast") != (levels[1] == "fast") and not incomparable(a, b)


def sibling(run: Run) -> Run | None:
    """The finished run next to this one, or in the same experiment, that makes a pair with this run; None if none does.

    Of several, a run with the same engine settings (an experiment sweeps them) comes first, and of those the newest.
    Damaged runs are skipped.
    """
    if run.kind != "run" or run.manifest.numerics is None:
        return None

    def schedule(manifest: Manifest) -> list[Any]:
        return [manifest.engine_settings.get(name) for name in SCHEDULE]

    fitting = []
    neighbours = _neighbours(run.source.resolve())
    for folder in sorted(neighbours, key=lambda path: -(path / DIGEST).stat().st_mtime_ns)[:SIBLINGS]:
        try:
            manifest = glance_at_manifest(folder / MANIFEST)  # a look at a few kB saves reading the run
        except (OSError, ValueError):
            continue
        same = all(manifest.identity.get(name) == run.identity.get(name) for name in SAME_INPUTS)
        if same and (manifest.numerics == "fast") != (run.manifest.numerics == "fast"):
            fitting.append((schedule(manifest) != schedule(run.manifest), folder))
    for _, folder in sorted(fitting, key=lambda pair: pair[0]):  # ties stay newest first
        try:
            other = load_run(folder)
        except (ConfigError, OSError, ValueError):
            continue
        if is_pair(run, other):
            return other
    return None


def _neighbours(here: Path) -> set[Path]:
    """Finished runs next to this one; for a run of an experiment (`1-<settings>/<run>`), its other runs too."""
    files = {*here.parent.glob(f"*/{DIGEST}")}
    if SWEEP_PLACE.fullmatch(here.parent.name):
        files |= {file for file in here.parent.parent.glob(f"*/*/{DIGEST}") if SWEEP_PLACE.fullmatch(file.parts[-3])}
    return {file.parent for file in files} - {here}
