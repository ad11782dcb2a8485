"""A run from disk, whatever it is: a run folder of ours, an output folder of lm-evaluation-harness, a baseline file."""

from __future__ import annotations

from pathlib import Path

from evalengine.errors import ConfigError, readable
from evalengine.records.lm_eval_file import results_files
from evalengine.report.read.baseline import is_baseline, load_baseline
from evalengine.report.read.experiment import experiment_runs
from evalengine.report.read.lm_eval_records import load_results
from evalengine.report.read.names import stands_for
from evalengine.report.read.places import RESULTS, is_run_folder
from evalengine.report.read.run import Loaded, Run
from evalengine.report.read.run_folder import load_folder


def load_run(path: str | Path, page: bool = True) -> Run:
    """A run folder, an lm-eval output folder (or its results file), or a baseline file; or a name that stands
    for one (`names`).

    page: whether the `report.html` of a run folder is checked, too.

    Raises `ConfigError` (the file at fault, and the cure) for what is missing, unreadable, unfinished, damaged or
    edited.
    """
    return load_with_samples(path, page).run


def load_with_samples(path: str | Path, page: bool = True) -> Loaded:
    """What `load_run` reads, and lm-eval's files that it was read from."""
    with readable(path):
        return _load(Path(stands_for(path)), page)


def _load(path: Path, page: bool) -> Loaded:
    if path.is_file():
        if results_files(path):
            return load_results(path)
        if not is_baseline(path) and is_run_folder(path.parent):
            raise ConfigError(f"{path}: one file of a run; give the folder: {path.parent}")
        return Loaded(load_baseline(path), {}, {})
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder; name a run's folder, or latest: the newest in {RESULTS}/")
    any(path.iterdir())  # raises where permission is lacking, in place of files that seem to be missing
    if is_run_folder(path):
        return load_folder(path, page)
    if results_files(path):
        return load_results(path)
    return _only_run_inside(path, page)


def _only_run_inside(path: Path, page: bool) -> Loaded:
    """The only run in a folder: lm-eval writes into <output_path>/<model>/, and results/ may hold a single run."""
    inside = sorted(child for child in path.iterdir() if child.is_dir())
    candidates = [child for child in inside if is_run_folder(child) or results_files(child)]
    if len(candidates) == 1:
        return load_with_samples(candidates[0], page)
    if candidates:
        names = ", ".join(child.name for child in candidates[:4]) + (", ..." if len(candidates) > 4 else "")
        raise ConfigError(f"{path}: it holds {len(candidates)} runs ({names}); name one of them")
    if runs := experiment_runs(path):
        raise ConfigError(f"{path}: an experiment of {len(runs)} runs; name one of them, such as {runs[0]}")
    raise ConfigError(f"{path}: no run in this folder (neither digest.txt nor results_*.json)")
