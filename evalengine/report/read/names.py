"""Where runs lie, and the names that stand for runs and their items: `latest`, `FOLDER:latest` and `SWEEP:3`, wherever
a command takes a run.

    latest             the newest finished run in results/
    FOLDER:latest      the newest one in another folder of runs
    SWEEP:3            run 3 of an experiment, as its report numbers them: the experiment's folder, or its name
                       (`noise_floor:3` is of the newest `results/noise_floor-...`)

A file or folder that really has such a name goes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, listed, readable
from evalengine.records.evidence import file_sha256, is_run_folder
from evalengine.records.folder import DIGEST
from evalengine.records.lm_eval_file import results_files
from evalengine.records.sealed import sha256_of
from evalengine.records.shapes import Text, UnicodeText, with_fields, wrong
from evalengine.report.read.run import Key, Run
from evalengine.util.plain_files import read_json

RESULTS = Path("results")  # output_dir's default
INDEX = "index.html"  # the list of all runs, next to them
SWEEP_PLACE = re.compile(r"\d+-.*")  # an experiment's folder for one of its runs: `<number>-<settings>/<run>`
GATE_PLACE = re.compile(r"gate-\d{8}T\d{6}-.*")  # the folder that `gate --keep` makes for its run
SWEEP_FORMAT = "evalengine.sweep"  # the format that an experiment's last file names
LATEST = "latest"
_RUN = with_fields({"source": Text, "digest?": UnicodeText})
_SWEEP = with_fields({"runs": list[_RUN], "picture_sha256?": Text})  # type: ignore[valid-type]
_NUMBERED = re.compile(r"(.+):(\d+)")


def runs_below(root: Path) -> list[Path]:
    """The folders of our runs in `root`, finished or not, whole or not, those of its experiments and gates among
    them; each once, whatever links to it."""
    return _distinct(folder for child in _folders(root) for folder in _runs_at(child))


def runs_in(path: Path) -> tuple[list[Path], list[Path]]:
    """Return (the runs in a folder of runs, ours and lm-eval's; its subfolders without a run). Both are empty for the
    folder of a run, and for a path that is no folder."""
    with readable(path):
        if is_run_folder(path) or results_files(path):
            return [], []
        inside = {child: [*_runs_at(child)] or [child] * bool(results_files(child)) for child in sorted(_folders(path))}
        return _distinct(run for runs in inside.values() for run in runs), [c for c, runs in inside.items() if not runs]


def skipped_note(name: str | Path) -> str:
    """Name the subfolders without a run of a folder of runs; "" without one. Raises `ConfigError` as `stands_for`."""
    empty = [folder.name for folder in runs_in(Path(stands_for(name)))[1]]
    return f"{name}: skipped subfolders without a run: {listed(empty, 3)}" if empty else ""


def holds_runs(path: Path) -> bool:
    """Whether this is a folder of runs and no run itself. A folder with a single output of lm-eval is none."""
    runs, _ = runs_in(path)
    return len(runs) > 1 or any(map(is_run_folder, runs))


def _distinct(folders: Iterable[Path]) -> list[Path]:
    """The folders, sorted, each once: by its real name if that is among them, else by the name of a link."""
    links_first = sorted(folders, key=lambda folder: (not folder.is_symlink(), folder))
    return sorted({folder.resolve(): folder for folder in links_first}.values())


def root_of(run: Path) -> Path:
    """The folder that holds a run and others; of an experiment's run, the folder that holds the experiment."""
    above = run.resolve().parent
    return above.parent.parent if SWEEP_PLACE.fullmatch(above.name) else above


def _runs_at(folder: Path) -> Iterator[Path]:
    """This folder, if it is a run; the runs in it, if it is an experiment, or an experiment's or gate's folder for a
    run."""
    if is_run_folder(folder):
        yield folder
        return
    place = SWEEP_PLACE.fullmatch(folder.name) or GATE_PLACE.fullmatch(folder.name)
    for child in _folders(folder):
        if place or SWEEP_PLACE.fullmatch(child.name):
            yield from _runs_at(child)


def _folders(path: Path) -> list[Path]:
    """The subfolders that are not hidden."""
    return [child for child in path.iterdir() if child.is_dir() and child.name[0] != "."] if path.is_dir() else []


def experiment_runs(folder: Path) -> list[str]:
    """The runs that an experiment's file in this folder lists, in its order; none where there is no such file.

    Raises `ConfigError` if the file was edited (it contains its hash, unless it is older than such hashes) or names
    a digest or picture that differs from the one there, and if the experiment is not finished. Runs that lack a digest,
    or are missing, are reported where they are opened.
    """
    for file, sweep in _experiment(folder):
        problem = wrong(sweep, _SWEEP)
        seal, picture = sweep.pop("sha256", None), file.with_suffix(".svg")
        if not problem and seal is not None and seal != sha256_of(sweep):
            problem = "its sha256 is not that of its content"
        for run in [] if problem else sweep["runs"]:
            digest = folder / run["source"] / DIGEST
            if run.get("digest") and digest.is_file() and digest.read_bytes().strip() != run["digest"].encode():
                problem = problem or f"it lists another digest for {run['source']} than that run has"
        drawn = None if problem else sweep.get("picture_sha256")
        if drawn is not None and picture.is_file() and file_sha256(picture) != drawn:
            problem = f"{picture.name} next to it is not the picture that was drawn"
        if problem:
            raise ConfigError(f"{file}: {problem}: it was edited or damaged; take it from where it was copied, or name "
                              "the runs in its folder one by one")  # fmt: skip
        return [str(folder / run["source"]) for run in sweep["runs"]]
    places = [child for child in _folders(folder) if SWEEP_PLACE.fullmatch(child.name) and not is_run_folder(child)]
    if started := sum(any(map(is_run_folder, _folders(place))) for place in places):
        raise ConfigError(
            f"{folder}: an experiment that is not finished ({started} of its runs were started); rerun its command to "
            "resume it, or name its runs"
        )
    return []


def _experiment(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of experiments in a folder, each with its content."""
    if (folder / "manifest.json").exists():  # a run has many files, some of them large
        return
    for file in sorted(folder.glob("*.json")):
        try:
            content = read_json(file)
        except (OSError, ValueError):
            continue  # the file is not an experiment's
        if isinstance(content, dict) and content.get("format") == SWEEP_FORMAT:
            yield file, content


def inputs(names: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the files and folders that a command's arguments name, and the files of named experiments. A name that
    stands for nothing is skipped: it is reported where it is read."""
    for name in names:
        with suppress(ConfigError), readable(name):
            place = Path(stands_for(name))
            yield from (place, *(file for file, _ in _experiment(place)))


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
        numbered = _NUMBERED.fullmatch(text)
        if numbered is None:
            return _newest_experiment(text) or name
        sweep, number = numbered[1], int(numbered[2])
        folder = Path(sweep) if Path(sweep).is_dir() else _newest_experiment(sweep)
        if folder is None:
            raise ConfigError(f"{text}: {sweep} is neither an experiment's folder nor the name of one in {RESULTS}/")
        if not (runs := experiment_runs(folder)):
            raise ConfigError(
                f"{text}: {folder} is no experiment's folder, so its runs have no numbers; name one of them"
            )
        if not 1 <= number <= len(runs):
            raise ConfigError(f"{text}: {folder} has runs 1 to {len(runs)}")
        return runs[number - 1]


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


def all_runs(names: Iterable[str]) -> list[str]:
    """`named_runs`; a single folder of runs, as a sweep (-m) leaves them in its output_dir, stands for these.

    Raises `ConfigError` as `named_runs` does.
    """
    runs = named_runs(names)
    return [*map(str, runs_in(Path(runs[0]))[0])] or runs if len(runs) == 1 else runs


def newest_run(root: Path, name: str = LATEST) -> Path:
    """The finished run below `root` whose digest was written last. Raises `ConfigError` if there is none."""
    finished = [folder for folder in runs_below(root) if (folder / DIGEST).is_file()]
    if not finished:
        raise ConfigError(f"{name}: no finished run in {root}/; name its folder, or another one: FOLDER:{LATEST}")
    return max(finished, key=lambda folder: ((folder / DIGEST).stat().st_mtime_ns, folder.name))


def _newest_experiment(name: str) -> Path | None:
    """The folder in results/ of the newest finished experiment of this name."""
    ended = [file.parent for file in RESULTS.glob("*/*.json") if file.parent.name.startswith(f"{file.stem}-")]
    ours = [folder for folder in ended if folder.name.startswith(f"{name}-") and (folder / f"{name}.json").exists()]
    return max(ours, key=lambda folder: (folder / f"{name}.json").stat().st_mtime_ns, default=None)


def named_item(run: Run, text: str, command: str) -> Key:
    """The key of the item named `3`, `gsm8k/3`, `gsm8k/3/1` or `gsm8k/3/1/0`. Raises `ConfigError` if there is none."""
    parts = text.split("/")
    tasks = sorted({key[0] for key in run.items})
    if len(parts) == 1 and len(tasks) == 1:
        parts = [tasks[0], *parts]
    if len(parts) < 2 or len(parts) > 4 or not all(part.isdecimal() for part in parts[1:]):
        names = ", ".join(f"{task}/0" for task in tasks)
        raise ConfigError(f"{command}: --item {text}: name a task and a document, such as {names}")
    first, second, third = [*map(int, parts[1:]), 0, 0][:3]
    key = (parts[0], first, second, third)
    if key not in run.items:
        raise ConfigError(f"{command}: --item {text}: {run.name} has no such request; its tasks are {', '.join(tasks)}")
    return key


def item_name(key: Key) -> str:
    """An item's name for people: `gsm8k doc 3`, with request and repeat where they are not the first."""
    return f"{key[0]} doc {document_name(key)}"


def document_name(key: Key) -> str:
    """An item's name after its task's: `3`, or `3 request 1`."""
    _, doc, request, repeat = key
    return str(doc) + (f" request {request}" if request else "") + (f" repeat {repeat}" if repeat else "")
