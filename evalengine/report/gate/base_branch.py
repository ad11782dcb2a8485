"""A baseline as the base branch has it: a change that is to be gated must not bring its own yardstick unseen."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from evalengine.errors import ConfigError
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Run


class NoBaseline(ConfigError):
    """Neither the checkout nor the base has a baseline: a first run."""


def load_from_base(file: Path, revision: str) -> tuple[Run, tuple[str, ...]]:
    """(the baseline, what a reviewer must know of it) for a baseline file in a git checkout.

    The base's file counts, and a change of it here is reported. Where the base has none, the file here counts, and that
    is reported: the first change that brings one cannot be held to anything else.

    Raises `ConfigError` without a checkout, without the revision in it, and for what cannot be read.
    """
    if file.is_dir():
        raise ConfigError(f"--base {revision}: {file} is a folder; a baseline file in git is needed")
    folder = file.parent if file.parent.is_dir() else Path()
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise ConfigError(
            f"--base {revision}: no such revision in this checkout, or no git checkout; fetch it first (git fetch "
            "origin BRANCH; with actions/checkout: fetch-depth: 0)"
        )
    name, short = f"{commit.decode().strip()}:./{file.name}", commit.decode()[:12]
    base_content = _git(folder, "cat-file", "blob", name)
    if base_content is None:
        if not file.exists():
            raise NoBaseline(f"{file}: neither here nor in {revision} ({short}); write one from a run that is good, "
                              f"and commit it: python -m evalengine baseline RUN -o {file}")  # fmt: skip
        return load_run(file), (f"the baseline is new in this pull request: {revision} ({short}) has no {file}",)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / file.name
        copy.write_bytes(base_content)
        run = load_run(copy)
    run = replace(run, source=Path(f"{file} of {revision} ({short})"))
    if file.exists() and file.read_bytes() == base_content:
        return run, ()
    change = "changed" if file.exists() else "removed"
    warning = f"baseline {change} in this pull request: {file}; the run is held to that of {revision} ({short})"
    return run, (warning,)


def _git(folder: Path, *words: str) -> bytes | None:
    """What git prints; None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
