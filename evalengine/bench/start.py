"""Whole commands, from their start to their end, phase by phase: `python -m evalengine bench start`.

Each is a separate process. The first one of a model finds empty caches (Triton's, CUDA's, the verdicts on the
kernels' schedules), and the files of Python's packages are taken out of the machine's memory before it: a fresh
machine, within what a process can do. The later ones find what it left. Last, one process answers the requests of
another task twice: what its first run takes beyond the second is what a process pays once.

The JSON has `environment` (`bench.environment`), `settings` and, for each model, `model`, `twice_s` (seconds of the two
runs in one process), and `commands`: `fresh`, `wall_s`, `digest` and `phases`, the seconds of each phase
(`util/phases.py`). Phases may overlap. `interpreter` is the time before the first phase, `exit` that after the last,
and `between` what no phase covers.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from evalengine.certify.model import SHAPE, shapes
from evalengine.errors import ConfigError, EvalEngineError, readable
from evalengine.plain_text import say, warn
from evalengine.records.folder import write_text_file
from evalengine.util.command import Namespace
from evalengine.util.phases import VARIABLE

CACHES = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
ENDS = ("interpreter", "between", "exit")  # what is computed of a command's phases
Span = tuple[float, float]  # begin and end, UNIX seconds


@dataclass(frozen=True)
class TimedCommand:
    """A command that has ended well."""

    fresh: bool  # whether it found empty caches
    wall_s: float
    digest: str
    phases: dict[str, float]


@dataclass(frozen=True)
class Started:
    """One model's commands, and the seconds of two runs in one process."""

    model: str
    commands: list[TimedCommand] = field(default_factory=list)
    twice_s: list[float] = field(default_factory=list)

    def wall(self, fresh: bool) -> float:
        """The median of the first commands' seconds, or of the later ones'."""
        return median(command.wall_s for command in self.commands if command.fresh is fresh)

    def phase(self, name: str, fresh: bool) -> float:
        return median(command.phases.get(name, 0.0) for command in self.commands if command.fresh is fresh)


def main(arguments: Namespace) -> int:
    """Runs `bench start` with its words; returns the exit code."""
    with readable(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    models: list[Started] = []
    with tempfile.TemporaryDirectory(prefix="evalengine-bench-") as scratch:
        places = [_model_words(path, arguments.tokenizer, Path(scratch)) for path in arguments.models]
        for path, words in zip(arguments.models, places, strict=True):
            folder = Path(scratch) / f"{len(models)}"
            models.append(_measured(path, [*arguments.settings, *words], arguments, folder))
    # Imported late, since it loads torch: files that a process uses cannot be forgotten.
    from evalengine.bench.environment import environment, provenance, slug

    about = environment(["python", "-m", "evalengine", "bench", "start", *_without_places(arguments.argv)])
    lines = table(models)
    where = str(about["gpu"] if about["driver"] else about["cpu"])
    settings = _without_places(arguments.settings)
    content = {"environment": about, "settings": settings, "models": [asdict(model) for model in models]}
    stem = arguments.output / f"start-{slug(where)}"
    write_text_file(stem.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    source = f"{provenance(about)}; median of the later commands."
    page = [f"# From a command to its end, on {where}", "", source, "", *lines, ""]
    write_text_file(stem.with_suffix(".md"), "\n".join(page))
    for line in lines:
        say(line)
    return 1 if any(len({command.digest for command in model.commands}) > 1 for model in models) else 0


def table(models: Sequence[Started]) -> list[str]:
    """A Markdown table: a row a phase, a column a model and state of the caches; then two runs in one process."""
    columns = [(model, fresh) for model in models for fresh in (True, False)]
    names = dict.fromkeys(name for model in models for command in model.commands for name in command.phases)
    names = dict.fromkeys([ENDS[0], *(name for name in names if name not in ENDS), *ENDS[1:]])
    rows = [["seconds", *(f"{model.model}, {'first' if fresh else 'later'}" for model, fresh in columns)],
            ["---", *["---:"] * len(columns)]]  # fmt: skip
    rows += [[name, *(f"{model.phase(name, fresh):.2f}" for model, fresh in columns)] for name in names]
    rows += [["**the whole command**", *(f"**{model.wall(fresh):.2f}**" for model, fresh in columns)]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for model in models:
        if model.twice_s:
            first, second = model.twice_s
            text = f"{model.model}, twice in one process: {first:.2f} and {second:.2f} s, {first / second:.2f} times"
            lines += ["", text]
    return lines


def phases_of(spans: Iterable[tuple[str, Span]], begin: float, end: float) -> dict[str, float]:
    """Seconds of each phase, and of what no phase covers, of a command that ran from `begin` to `end`. Spans of one
    name that overlap count once."""
    by_name: dict[str, list[Span]] = {}
    for name, span in spans:
        by_name.setdefault(name, []).append(span)
    every = [span for own in by_name.values() for span in own]
    if not every:
        return {"between": end - begin}
    first, last = min(span[0] for span in every), max(span[1] for span in every)
    ordered = sorted(by_name, key=lambda name: min(by_name[name]))
    between = last - first - _covered(every)
    own = {name: _covered(by_name[name]) for name in ordered}
    return {"interpreter": first - begin, **own, "between": between, "exit": end - last}


def _covered(spans: Sequence[Span]) -> float:
    """The seconds in which at least one of the spans lasts."""
    seconds, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return seconds


def _measured(model: str, words: Sequence[str], arguments: Namespace, folder: Path) -> Started:
    """One model's figures. folder: its caches and runs."""
    started = Started(model.removeprefix(SHAPE))
    for number in range(arguments.rounds + 1):
        if number == 0:
            forget_files()
        started.commands.append(_command(words, folder, number))
        warn(f"{started.model}: {started.commands[-1].wall_s:.2f} s", "bench: ")
    if arguments.twice:
        settings = [word for word in words if not word.startswith(("task=", "limit="))]
        spoken = _python(["-m", "evalengine.bench.start_twice", *settings, *arguments.twice], _variables(folder))
        started.twice_s.extend(json.loads(spoken.splitlines()[-1]))
    return started


def _command(words: Sequence[str], folder: Path, number: int) -> TimedCommand:
    noted = folder / f"phases-{number}"
    variables = {**_variables(folder), VARIABLE: str(noted)}
    begin = time.time()
    spoken = _python(["-m", "evalengine", *words, "progress=false", f"output_dir={folder / str(number)}"], variables)
    end = time.time()
    lines = map(json.loads, noted.read_text(encoding="utf-8").splitlines())
    spans = [(line["phase"], (line["begin"], line["end"])) for line in lines]
    digest = spoken.splitlines()[-1].removeprefix("digest: ")
    return TimedCommand(number == 0, end - begin, digest, phases_of(spans, begin, end))


def _variables(folder: Path) -> dict[str, str]:
    """The environment in which all caches lie below the folder."""
    places = {name: folder / "caches" / name.lower() for name in CACHES}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    return {**os.environ, **{name: str(place) for name, place in places.items()}}


def _python(arguments: Sequence[str], variables: dict[str, str]) -> str:
    """The standard output of Python with these arguments. Raises EvalEngineError if it fails."""
    process = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)
    if process.returncode:
        command, why = " ".join(["python", *arguments[:3]]), process.stderr.strip()[-400:]
        raise EvalEngineError(f"bench start: `{command} ...` failed: {why}")
    return process.stdout


def forget_files() -> None:
    """Takes the files of Python's packages out of the machine's memory, where the system knows how, as a machine that
    has just been started has read none. Files in use by other processes stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    for folder in {sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")}:
        for file in Path(folder).rglob("*"):
            with suppress(OSError):
                if file.is_file():
                    descriptor = os.open(file, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)


def _model_words(path: str, tokenizer: str, scratch: Path) -> list[str]:
    """The settings that name the model; a shape has dummy weights, and the tokenizer that is named."""
    if not path.startswith(SHAPE):
        return [f"model.path={path}"]
    name = path.removeprefix(SHAPE)
    if name not in shapes():
        raise ConfigError(f"--models {path}: no such shape; there are {', '.join(SHAPE + known for known in shapes())}")
    folder = scratch / name
    folder.mkdir(exist_ok=True)
    write_text_file(folder / "config.json", json.dumps(shapes()[name]))
    return [f"model.path={folder}", f"model.name={name}", "model.load_format=dummy", f"model.tokenizer={tokenizer}"]


def _without_places(words: Sequence[str]) -> list[str]:
    """Return the words as a published command shows them: files by their last part, quoted for a shell."""
    split = (word.rpartition("=") for word in words)
    return [shlex.quote(f"{name}{sign}{Path(value).name if '/' in value else value}") for name, sign, value in split]
