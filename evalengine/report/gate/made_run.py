"""A gate that makes its run itself: `gate BASELINE -- task=... limit=...`, in a process and a folder of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from evalengine.errors import ConfigError, EvalEngineError, readable
from evalengine.util.endings import hold_back

OURS = ("output_dir", "resume", "sequential")  # settings that the gate makes itself


@contextmanager
def made_run(settings: Sequence[str], keep: Path | None, more: Mapping[str, str] | None = None) -> Iterator[Path]:
    """The folder of a run with these settings: a new one below `keep`, or one that is removed afterwards. What earlier
    runs left is never judged. more: settings of the gate's own, as texts.

    Raises `ConfigError` for settings that the gate makes itself, `EvalEngineError` if the run fails.
    """
    for word in settings:
        name = word.partition("=")[0].lstrip("+~")
        if name.partition(".")[0] in OURS or word in ("-m", "--multirun"):
            raise ConfigError(
                f"gate: {word}: the gate makes one new run in a folder of its own; --keep FOLDER keeps it"
            )
        if name in ("cache", "cache.path"):
            raise ConfigError(f"gate: {word}: answers of earlier code would be judged; leave the cache out")
    settings = [*settings, *(f"{name}={_quoted(value)}" for name, value in (more or {}).items())]
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="evalengine-gate-") as folder:
            yield _run(settings, Path(folder))
        return
    with readable(f"gate: --keep {keep}"):
        keep.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"gate-{datetime.now():%Y%m%dT%H%M%S}-", dir=keep)
    yield _run(settings, Path(folder))


def _quoted(text: str) -> str:
    """A text in quotes, as the grammar of settings reads it."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.single).with_quotes())


def _run(settings: Sequence[str], folder: Path) -> Path:
    command = ["-m", "evalengine", *settings]
    done = subprocess.run(  # 2 is stderr
        [sys.executable, *command, f"output_dir={folder}"], stdout=2, check=False, preexec_fn=hold_back
    )
    if done.returncode != 0:
        shown = shlex.join(["python", *command])
        raise EvalEngineError(f"{shown}: the run failed with exit code {done.returncode}; what it printed says why")
    return folder
