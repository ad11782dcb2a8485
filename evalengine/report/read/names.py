"""Names that stand for a run: `latest`, `FOLDER:latest` and `SWEEP:3`, wherever a command takes a run.

    latest             the newest finished run in results/
    FOLDER:latest      the newest one in another folder of runs
    SWEEP:3            run 3 of an experiment, as its report numbers them: the experiment's folder, or its name
                       (`noise_floor:3` is of the newest `results/noise_floor-...`)

A file or folder that really has such a name goes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from evalengine.errors import ConfigError, readable
from evalengine.records.folder import DIGEST
from evalengine.report.read.experiment import experiment_runs
from evalengine.report.read.places import INDEX, RESULTS, runs_below

LATEST = "latest"
_NUMBERED = re.compile(r"(.+):(\d+)")


def stands_for(name: str | Path) -> str | Path:
    """The folder that such a name stands for; any other name as it is.

    Raises `ConfigError` where there is no such run.
    """
    text = str(name)
    with readable(text):
        if Path(text).exists():
            return name
        if text == LATEST:
            return newest_run(RESULTS, text)
        if text.endswith(f":{LATEST}"):
            return newest_run(Path(text.removesuffix(f":{LATEST}")), text)
        if numbered := _NUMBERED.fullmatch(text):
            return _numbered(text, numbered[1], int(numbered[2]))
    return name


def named_runs(names: Iterable[str]) -> list[str]:
    """The runs that a command's arguments name: a finished experiment's folder stands for its runs, `latest` and
    `SWEEP:3` for one, the index of a folder of runs for none, all else for itself.

    Raises `ConfigError` for the folder of an unfinished experiment, and for what cannot be read.
    """
    runs, all_names = [], list(names)
    for name in map(str, map(stands_for, all_names)):
        with readable(name):
            listed = Path(name).name == INDEX and len(all_names) > 1  # `results/*` names the index, too
            runs += experiment_runs(Path(name)) or ([] if listed else [name])
    return runs


def newest_run(root: Path, name: str = LATEST) -> Path:
    """The finished run below `root` whose digest was written last. Raises `ConfigError` if there is none."""
    finished = [folder for folder in runs_below(root) if (folder / DIGEST).is_file()]
    if not finished:
        raise ConfigError(f"{name}: no finished run in {root}/; name its folder, or another one: FOLDER:{LATEST}")
    return max(finished, key=lambda folder: ((folder / DIGEST).stat().st_mtime_ns, folder.name))


def _numbered(name: str, sweep: str, number: int) -> str:
    folder = Path(sweep) if Path(sweep).is_dir() else _newest_experiment(sweep)
    if folder is None:
        raise ConfigError(f"{name}: {sweep} is neither an experiment's folder nor the name of one in {RESULTS}/")
    runs = named_runs([str(folder)])
    if runs == [str(folder)]:
        raise ConfigError(f"{name}: {folder} is no experiment's folder, so its runs have no numbers; name one of them")
    if not 1 <= number <= len(runs):
        raise ConfigError(f"{name}: {folder} has runs 1 to {len(runs)}")
    return runs[number - 1]


def _newest_experiment(name: str) -> Path | None:
    """The folder in results/ of the newest finished experiment of this name."""
    ended = [file.parent for file in RESULTS.glob("*/*.json") if file.parent.name.startswith(f"{file.stem}-")]
    ours = [folder for folder in ended if folder.name.startswith(f"{name}-") and (folder / f"{name}.json").exists()]
    return max(ours, key=lambda folder: (folder / f"{name}.json").stat().st_mtime_ns, default=None)
