"""Where a gate's two runs come from: the baseline as the base branch has it, since a change that is to be gated must
not bring its own yardstick unseen, and a run that the gate makes itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from evalengine.errors import ConfigError, EvalEngineError, readable
from evalengine.report.read.load import load_run
from evalengine.report.read.names import runs_below
from evalengine.report.read.run import Run
from evalengine.util.endings import hold_back

NEW_FOLDER = "the gate makes one new run in a folder of its own; --keep FOLDER keeps it"
OURS = {  # settings that the gate makes itself -> what to do instead
    **dict.fromkeys(("output_dir", "resume", "-m", "--multirun"), NEW_FOLDER),
    "sequential": "the gate sets it; --step N asks in steps, in an order that follows from the baseline",
}


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


@contextmanager
def made_run(settings: Sequence[str], keep: Path | None, more: Mapping[str, str] | None = None) -> Iterator[Path]:
    """The folder of a run with these settings: a new one below `keep`, or one that is removed afterwards. What earlier
    runs left is never judged. more: settings of the gate's own, as texts.

    Raises `ConfigError` for settings that the gate makes itself, `EvalEngineError` if the run fails.
    """
    for given in settings:
        name = given.partition("=")[0].lstrip("+~")
        if (instead := OURS.get(name.partition(".")[0])) is not None:
            raise ConfigError(f"gate: {given}: {instead}")
        if name in ("cache", "cache.path"):
            raise ConfigError(f"gate: {given}: answers of earlier code would be judged; leave the cache out")
    from evalengine.config.words import word  # it loads Hydra

    settings = [*settings, *(word(name, value) for name, value in (more or {}).items())]
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="evalengine-gate-") as folder:
            yield _run(settings, Path(folder))
        return
    with readable(f"gate: --keep {keep}"):
        keep.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"gate-{datetime.now():%Y%m%dT%H%M%S}-", dir=keep)
    yield _run(settings, Path(folder))


def _run(settings: Sequence[str], folder: Path) -> Path:
    command = ["-m", "evalengine", *settings]
    done = subprocess.run(  # 2 is stderr
        [sys.executable, *command, f"output_dir={folder}"], stdout=2, check=False, preexec_fn=hold_back
    )
    if done.returncode != 0:
        shown = shlex.join(["python", *command])
        raise EvalEngineError(f"{shown}: the run failed with exit code {done.returncode}; what it printed says why")
    runs = runs_below(folder)
    return runs[0] if len(runs) == 1 else folder
