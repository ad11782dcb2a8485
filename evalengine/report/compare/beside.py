"""Runs that lie beside others and say more of them: the same under the other kind of numerics, and one that tells a
setting from a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.folder import DIGEST
from evalengine.records.manifest import MANIFEST
from evalengine.records.manifest_data import Manifest
from evalengine.records.manifest_file import glance_at_manifest, missing_for_page
from evalengine.report.compare.comparability import incomparable
from evalengine.report.read.load import load_run
from evalengine.report.read.names import SWEEP_PLACE, runs_below
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
    """The finished run beside this one, or in the same experiment, that makes a pair with this run; None if none does.

    Of several, a run with the same engine settings (an experiment sweeps them) comes first, and of those the newest.
    Damaged runs are passed over.
    """
    if run.kind != "run" or run.manifest.numerics is None:
        return None

    def promises(manifest: Manifest) -> bool:
        same = all(manifest.identity.get(name) == run.identity.get(name) for name in SAME_INPUTS)
        return same and (manifest.numerics == "fast") != (run.manifest.numerics == "fast")

    def schedule(manifest: Manifest) -> list[Any]:
        return [manifest.engine_settings.get(name) for name in SCHEDULE]

    here = run.source.resolve()
    newest = sorted(_neighbours(here), key=lambda path: (path / DIGEST).stat().st_mtime_ns, reverse=True)[:SIBLINGS]
    settings = schedule(run.manifest)
    alike = sorted(_fitting(newest, promises), key=lambda pair: schedule(pair[1]) != settings)  # ties stay newest first
    return next((other for other in _loaded(folder for folder, _ in alike) if is_pair(run, other)), None)


def second_run(a: Run, b: Run) -> Run | None:
    """The newest finished run with B's identity and A's schedule in the folders that hold A and B: it tells a setting
    from a schedule. None if there is none, or if none can be read."""

    def schedule(manifest: Manifest) -> dict[str, Any]:
        """The engine's settings as they ran, without what it counted."""
        return {name: value for name, value in (manifest.content.get("engine") or {}).items() if name != "stats"}

    wanted = (b.identity, schedule(a.manifest))
    roots = {root for run in (a, b) if (root := run.source.parent).is_dir()}
    folders = [folder for root in roots for folder in runs_below(root)]
    newest = sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
    fitting = _fitting(newest, lambda manifest: (manifest.identity, schedule(manifest)) == wanted)
    return next(_loaded(folder for folder, _ in fitting), None)


def _fitting(folders: Iterable[Path], fits: Callable[[Manifest], bool]) -> Iterator[tuple[Path, Manifest]]:
    """The folders whose manifest fits; a look at a few kB saves reading the run."""
    for folder in folders:
        try:
            manifest = glance_at_manifest(folder / MANIFEST)
            if fits(manifest):
                yield folder, manifest
        except (OSError, ValueError):
            continue


def _loaded(folders: Iterable[Path]) -> Iterator[Run]:
    """The runs in these folders, without those that cannot be read."""
    for folder in folders:
        try:
            yield load_run(folder)
        except (ConfigError, OSError, ValueError):
            continue


def _neighbours(here: Path) -> set[Path]:
    """Finished runs beside this one; for a run of an experiment (`1-<settings>/<run>`), its other runs too."""
    files = {*here.parent.glob(f"*/{DIGEST}")}
    if SWEEP_PLACE.fullmatch(here.parent.name):
        files |= {file for file in here.parent.parent.glob(f"*/*/{DIGEST}") if SWEEP_PLACE.fullmatch(file.parts[-3])}
    return {file.parent for file in files} - {here}
