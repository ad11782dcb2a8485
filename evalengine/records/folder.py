"""A run's folder: made or taken up again, locked while in use, and finished by its digest.

`results/<task>-<model>-<time>-<id>/` belongs to one process at a time (a lock on `.lock`). It is unfinished until
`digest.txt` exists, which is written last; every file appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.records.manifest import differences

DIGEST, RECORDS = "digest.txt", "records.parquet"
JOURNAL, LOCK, IDENTITY = "journal.jsonl", ".lock", "identity.json"  # gone once the run is finished
NAME_LIMIT = 120  # characters of <task>-<model>; a file name holds 255


class RunFolder:
    """An open, locked run folder. Use it as a context manager; `finish` marks the run done."""

    def __init__(self, path: Path, lock: int, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self._lock: int | None = lock

    @classmethod
    def open(
        cls, output_dir: str | Path, name: str, run_id: str, resume: str, identity: Mapping[str, Any]
    ) -> RunFolder:
        """The folder for a run called `name` ("<task>-<model>").

        resume: "auto" takes up the newest unfinished folder with this id that no process holds, or makes a new one;
        "never" makes a new one; anything else is the folder to take up, whose identity must be this run's.
        Raises `ConfigError` if that folder does not fit, `EvalEngineError` if the disk refuses.
        """
        root = Path(output_dir)
        try:
            if resume not in ("auto", "never"):
                return cls._take_up(Path(resume), run_id, identity)
            if resume == "auto":
                for path in _unfinished(root, run_id):
                    if (lock := _acquire(path)) is not None:
                        return cls(path, lock, resumed=True)
            return cls._create(root, name, run_id, identity)
        except OSError as error:
            raise write_failed(root, error) from error

    @classmethod
    def _create(cls, root: Path, name: str, run_id: str, identity: Mapping[str, Any]) -> RunFolder:
        root.mkdir(parents=True, exist_ok=True)
        stem = f"{sanitise(name)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        for attempt in range(1, 1000):  # runs started in the same second
            path = root / (f"{stem}-{run_id}" if attempt == 1 else f"{stem}.{attempt}-{run_id}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            lock = _acquire(path)
            if lock is None:  # another process took the new folder up in between: it is theirs
                continue
            folder = cls(path, lock, resumed=False)
            try:
                folder.write_json(IDENTITY, {"run_id": run_id, **identity})
            except BaseException:  # without it no run would ever take this folder up
                folder.close()
                shutil.rmtree(path, ignore_errors=True)
                raise
            return folder
        raise EvalEngineError(f"output_dir={root}: a thousand runs named {stem} already; use another output_dir")

    @classmethod
    def _take_up(cls, path: Path, run_id: str, identity: Mapping[str, Any]) -> RunFolder:
        if (path / DIGEST).exists():
            raise ConfigError(f"resume={path}: that run is finished; set resume=never to run it again")
        if not (path / IDENTITY).is_file():
            raise ConfigError(f"resume={path}: not the folder of an evalengine run ({IDENTITY} is missing)")
        stored = json.loads((path / IDENTITY).read_text(encoding="utf-8"))
        if stored.pop("run_id", None) != run_id:
            found = "; ".join(differences(stored, identity)) or "it was written by another version"
            raise ConfigError(f"resume={path}: it holds another run: {found}. Match it, or set resume=auto")
        lock = _acquire(path)
        if lock is None:
            raise ConfigError(f"resume={path}: another process is running it")
        return cls(path, lock, resumed=True)

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file that appears whole or not at all. Raises `EvalEngineError` if the disk refuses."""
        return self.write_with(name, lambda path: path.write_text(text, encoding="utf-8"))

    def write_json(self, name: str, value: Any) -> Path:
        """The same, as indented JSON."""
        return self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_with(self, name: str, write: Callable[[Path], Any]) -> Path:
        """The same, by a function that fills the path it is given."""
        target = self.path / name
        try:
            write_whole(target, write)
        except OSError as error:
            raise write_failed(target, error) from error
        return target

    def finish(self, digest: str) -> None:
        """Marks the run done by its digest; what only an unfinished run needs is removed."""
        assert (self.path / RECORDS).exists(), "records first, then the digest"
        self.write_text(DIGEST, digest + "\n")
        for name in (JOURNAL, IDENTITY, LOCK):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets other processes have the folder; further calls do nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, KeyboardInterrupt) and not error.args:
            error.args = (str(self.path),)  # the command line tells where the finished requests are


def sanitise(name: str) -> str:
    """`name` as one part of a path: letters, digits and . _ + - only, of limited length."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", name).lstrip(".-")[:NAME_LIMIT] or "run"


def write_whole(target: Path, write: Callable[[Path], Any]) -> None:
    """A file that appears whole or not at all, by a function that fills the path it is given."""
    scratch = target.parent / f".{target.name}.partial"
    try:
        write(scratch)
        _sync(scratch)
        os.replace(scratch, target)
        _sync(target.parent)
    finally:
        scratch.unlink(missing_ok=True)


def write_failed(path: Path, error: OSError) -> EvalEngineError:
    """A failed write in one sentence, with its cure."""
    why = error.strerror or str(error)
    return EvalEngineError(f"could not write {path}: {why}; cure that and run the same command again: it resumes")


def _unfinished(root: Path, run_id: str) -> Iterator[Path]:
    """This id's unfinished folders, newest first (the time is part of the name, so ties are broken by it)."""
    paths = [path for path in root.glob(f"*-{run_id}") if (path / IDENTITY).is_file()]
    for path in sorted(paths, key=lambda path: ((path / IDENTITY).stat().st_mtime_ns, path.name), reverse=True):
        if not (path / DIGEST).exists():
            yield path


def _acquire(path: Path) -> int | None:
    """A lock on the folder, held until its descriptor closes; None if it is held, or the run finished meanwhile."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if (path / DIGEST).exists():
        os.close(descriptor)
        (path / LOCK).unlink(missing_ok=True)
        return None
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
