"""Where runs lie: whether a folder is a run, the runs in a folder, and the folder that holds a run beside others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from evalengine.errors import readable
from evalengine.records.folder import DIGEST, IDENTITY, JOURNAL, RECORDS
from evalengine.records.lm_eval_file import results_files
from evalengine.records.manifest import MANIFEST

RESULTS = Path("results")  # output_dir's default
INDEX = "index.html"  # the list of all runs that lies beside them
SWEEP_PLACE = re.compile(r"\d+-.*")  # an experiment's folder for one of its runs: `<number>-<settings>/<run>`


def is_run_folder(path: Path) -> bool:
    """Whether this is a run of ours, finished or not, whole or not."""
    return any((path / name).is_file() for name in (DIGEST, RECORDS, JOURNAL, IDENTITY, MANIFEST))


def runs_below(root: Path) -> list[Path]:
    """The folders of our runs in `root`, finished or not, whole or not, those of its experiments among them."""
    return sorted(folder for child in _folders(root) for folder in _runs_at(child))


def holds_runs(path: Path) -> bool:
    """Whether this is a folder of runs and no run itself. A folder with a single output of lm-eval is none."""
    with readable(path):
        if not path.is_dir() or is_run_folder(path) or results_files(path):
            return False
        foreign = [child for child in path.iterdir() if child.is_dir() and results_files(child)]
        return bool(runs_below(path)) or len(foreign) > 1


def root_of(run: Path) -> Path:
    """The folder that holds a run beside others; of an experiment's run, the folder that holds the experiment."""
    above = run.resolve().parent
    return above.parent.parent if SWEEP_PLACE.fullmatch(above.name) else above


def _runs_at(folder: Path) -> Iterator[Path]:
    """This folder, if it is a run; the runs in it, if it is an experiment or an experiment's folder for a run."""
    if is_run_folder(folder):
        yield folder
        return
    place = SWEEP_PLACE.fullmatch(folder.name)
    for child in _folders(folder):
        if place or SWEEP_PLACE.fullmatch(child.name):
            yield from _runs_at(child)


def _folders(path: Path) -> list[Path]:
    return [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
