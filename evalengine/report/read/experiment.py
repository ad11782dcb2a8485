"""The runs of an experiment, as the file that it ends with lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.evidence import file_sha256
from evalengine.records.sealed import sha256_of
from evalengine.records.shapes import text, wrong
from evalengine.report.read.places import SWEEP_PLACE, is_run_folder
from evalengine.util.plain_files import read_json

SWEEP_FORMAT = "evalengine.sweep"  # the format that an experiment's last file names


def experiment_runs(folder: Path) -> list[str]:
    """The runs that an experiment's file in this folder lists, in its order; none where there is no such file."""
    if not folder.is_dir() or (folder / "manifest.json").exists():  # a run has many files, some of them large
        return []
    for file in sorted(folder.glob("*.json")):
        try:
            content = read_json(file)
        except (OSError, ValueError):
            continue  # the file is not an experiment's
        if isinstance(content, dict) and content.get("format") == SWEEP_FORMAT:
            return [str(folder / source) for source in _listed(file, content)]
    if places := [child for child in folder.iterdir() if _is_place(child)]:
        raise ConfigError(
            f"{folder}: an experiment that is not finished ({len(places)} of its runs were begun); its command, given "
            "again, takes it up; or name its runs"
        )
    return []


def _listed(file: Path, sweep: dict[str, Any]) -> list[str]:
    """The places of the runs in an experiment's file. Raises `ConfigError` if it was edited: it carries its own hash,
    unless it was written before such files did."""
    problem = wrong(sweep, {"runs": [{"source": text, "digest?": text}], "picture_sha256?": text})
    seal = sweep.pop("sha256", None)
    if not problem and seal is not None and seal != sha256_of(sweep):
        problem = "its sha256 is not that of its content"
    problem = problem or _elsewhere(file, sweep)
    if problem:
        raise ConfigError(f"{file}: {problem}: it was edited or damaged; take it from where it was copied, or name the "
                          "runs in its folder one by one")  # fmt: skip
    return [run["source"] for run in sweep["runs"]]


def _elsewhere(file: Path, sweep: dict[str, Any]) -> str:
    """Which run or picture beside an experiment's file is not the one that it lists; "" if none. Runs that lack a
    digest, or are gone, are reported where they are opened."""
    for run in sweep["runs"]:
        digest = file.parent / run["source"] / "digest.txt"
        if run.get("digest") and digest.is_file() and digest.read_bytes().strip() != run["digest"].encode():
            return f"it lists another digest for {run['source']} than that run has"
    picture = file.with_suffix(".svg")
    if "picture_sha256" in sweep and picture.is_file() and file_sha256(picture) != sweep["picture_sha256"]:
        return f"{picture.name} beside it is not the picture that was drawn"
    return ""


def _is_place(folder: Path) -> bool:
    """Whether this is where an experiment put one of its runs."""
    if not SWEEP_PLACE.fullmatch(folder.name) or not folder.is_dir() or is_run_folder(folder):
        return False
    return any(is_run_folder(child) for child in folder.iterdir() if child.is_dir())
