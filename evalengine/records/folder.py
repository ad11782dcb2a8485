"""A run's folder: made or taken up again, locked while in use, and finished by its digest.

`results/<task>-<model>-<time>-<id>/` belongs to one process at a time (a lock on `.lock`). It is unfinished until
`digest.txt` exists, which is the last of its evidence; every file appears whole or not at all. `identity.json` goes
when the page is there too: a folder that holds both belongs to a run that was killed in between, and the same command
takes it up to finish it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from evalengine.errors import ConfigError, EvalEngineError, readable
from evalengine.plain_text import warn
from evalengine.records.sealed import content_sha256, differences, run_id_of
from evalengine.records.shapes import Text, with_fields, wrong
from evalengine.util.plain_files import read_json

DIGEST, RECORDS = "digest.txt", "records.parquet"
JOURNAL, LOCK, IDENTITY = "journal.jsonl", ".lock", "identity.json"  # gone once the run is finished
MADE_WITH = "made_with"  # key of the identity's file, outside the identity
Versions = Mapping[str, str | None]
NO_VERSIONS: Versions = {}
NAME_LIMIT = 120  # characters of <task>-<model>; a file name holds 255


class RunFolder:
    """An open, locked run folder. Use it as a context manager; `finish` marks the run done, `tidy` ends its life as an
    unfinished one."""

    def __init__(self, path: Path, identity: Mapping[str, Any] | None = None, lock: int | None = None) -> None:
        """lock: the lock's descriptor; None for a folder that no other process uses, which no command resumes."""
        self.path = path
        self.identity_sha256 = content_sha256(identity or {})
        self._lock = lock

    @classmethod
    def open(
        cls,
        output_dir: str | Path,
        name: str,
        resume: str,
        identity: Mapping[str, Any],
        made_with: Versions = NO_VERSIONS,
    ) -> RunFolder:
        """The folder for a run called `name` ("<task>-<model>").

        resume: "auto" resumes the newest folder of this identity that is unfinished, or finished but for its
        page, and that no process holds, or makes a new one; "never" makes a new one; anything else is the folder to
        resume, whose identity must be this run's.
        made_with: versions of the libraries that an answer's bits or text can depend on. A folder that was started with
        others is not taken up: half of its answers would be theirs.
        Raises `ConfigError` if that folder does not fit, `EvalEngineError` if the disk refuses.
        """
        root = Path(output_dir)
        if resume not in ("auto", "never"):
            with readable(f"resume={resume}"):
                return cls._take_up(Path(resume), identity, made_with)
        try:
            for path in _unfinished(root, identity, made_with) if resume == "auto" else ():
                if (lock := _acquire(path)) is not None:
                    return cls(path, identity, lock)._with_identity(identity, made_with)
            return cls._create(root, name, identity, made_with)
        except OSError as error:
            raise write_failed(root, error) from error

    @classmethod
    def _create(cls, root: Path, name: str, identity: Mapping[str, Any], made_with: Versions) -> RunFolder:
        root.mkdir(parents=True, exist_ok=True)
        run_id = run_id_of(identity)
        stem = f"{sanitise(name)}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        for attempt in range(1, 1000):  # runs started in the same second
            path = root / (f"{stem}-{run_id}" if attempt == 1 else f"{stem}.{attempt}-{run_id}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            if (lock := _acquire(path)) is not None:  # else another process has taken up the new folder in between
                return cls(path, identity, lock)._with_identity(identity, made_with)
        raise EvalEngineError(f"output_dir={root}: a thousand runs named {stem} already; use another output_dir")

    def _with_identity(self, identity: Mapping[str, Any], made_with: Versions) -> RunFolder:
        """Writes the identity of a new folder, or of one whose process was killed before it could."""
        if (self.path / IDENTITY).exists():
            return self
        try:
            self.write_json(IDENTITY, {"run_id": run_id_of(identity), **identity, MADE_WITH: dict(made_with)})
        except BaseException:  # no setting of `resume` would resume a folder with other files and no identity
            self.close()
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return self

    @classmethod
    def _take_up(cls, path: Path, identity: Mapping[str, Any], made_with: Versions) -> RunFolder:
        if (path / DIGEST).exists() and not (path / IDENTITY).exists():
            raise ConfigError(f"resume={path}: that run is finished; set resume=never to run it again")
        if not (path / IDENTITY).is_file():
            raise ConfigError(f"resume={path}: not the folder of an evalengine run ({IDENTITY} is missing)")
        try:
            stored, started_with = _read_identity(path)
        except ValueError as error:
            raise ConfigError(f"resume={path}: its {IDENTITY} is damaged ({error}); set resume=never") from error
        if stored != {"run_id": run_id_of(identity), **identity}:
            del stored["run_id"]
            changes = "; ".join(differences(stored, identity)) or "it was written by another version"
            raise ConfigError(f"resume={path}: it holds another run: {changes}. Match it, or set resume=auto")
        if others := other_versions(started_with, made_with):
            raise ConfigError(
                f"resume={path}: it was started with {others}: half of its answers would be theirs. Install those, or "
                "set resume=never"
            )
        lock = _acquire(path)
        if lock is None:
            raise ConfigError(f"resume={path}: another process is running it")
        return cls(path, identity, lock)

    @property
    def finished(self) -> bool:
        """Whether all evidence is there; a run that is taken up in this state lacks at most its page."""
        return (self.path / DIGEST).exists()

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file that appears whole or not at all. Raises `EvalEngineError` if the disk refuses."""
        return self.write_with(name, lambda path: path.write_text(text, encoding="utf-8"))

    def write_json(self, name: str, value: Any) -> Path:
        """Writes a value as indented JSON, as `write_text` does."""
        return self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_with(self, name: str, write: Callable[[Path], Any]) -> Path:
        """Writes a file by a function that fills the path it is given, as `write_text` does."""
        target = self.path / name
        try:
            write_whole(target, write)
        except OSError as error:
            raise write_failed(target, error) from error
        return target

    def finish(self, digest: str) -> None:
        """Marks the run done by its digest."""
        assert (self.path / RECORDS).exists(), "records first, then the digest"
        self.write_text(DIGEST, digest + "\n")

    def tidy(self) -> None:
        """Removes what only an unfinished run needs; the identity last, since with it the folder is taken up again."""
        assert self.finished, "the digest first"
        try:
            for path in [self.path / JOURNAL, *self.path.glob(".*.partial"), self.path / LOCK, self.path / IDENTITY]:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise write_failed(self.path, error) from error

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
    """Writes a file that appears whole or not at all, by a function that fills the path it is given.

    A link stays: its target is replaced. A pipe or a device is written to instead, since nothing may take its place.
    """
    if target.exists() and not target.is_file():
        write(target)
        return
    target = Path(os.path.realpath(target))
    scratch = target.parent / f".{target.name}.partial"
    try:
        write(scratch)
        _sync(scratch)
        os.replace(scratch, target)
        _sync(target.parent)
    finally:
        scratch.unlink(missing_ok=True)


class TextFile(NamedTuple):
    """A file that belongs to no run's folder and is yet to be written."""

    path: Path
    text: str
    holds: str = ""  # its content in words, such as `12 samples`


def write_text_file(file: Path, text: str, append: bool = False) -> int:
    """Writes a text that belongs to no run's folder, whole or not at all, making folders on its way; returns its bytes.

    append: whether it is added to the file, which other programs may be adding to. A lone surrogate, which a model's
    text may hold and UTF-8 does not, is written as its escape. Raises `EvalEngineError` if the disk refuses.
    """
    content = text.encode("utf-8", "backslashreplace")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if append:
            with file.open("ab", buffering=0) as out:
                size = os.fstat(out.fileno()).st_size
                if (out.write(content) or 0) < len(content):  # a full disk takes a part
                    out.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            write_whole(file, lambda path: path.write_bytes(content))
    except OSError as error:
        raise EvalEngineError(f"could not write {file}: {error.strerror or error}; name another place") from error
    return len(content)


def write_failed(path: Path, error: OSError) -> EvalEngineError:
    """The error for a failed write, one sentence that says how to fix it."""
    why = error.strerror or str(error)
    return EvalEngineError(f"could not write {path}: {why}; fix this and rerun the command to resume")


def other_versions(started_with: Versions, made_with: Versions) -> str:
    """The libraries whose versions differ, such as "torch 2.11.0 (here 2.13.0)"; "" where they are the same. A folder
    of an older evalengine names none."""
    names = [name for name in sorted(started_with.keys() & made_with.keys()) if started_with[name] != made_with[name]]
    return ", ".join(f"{name} {started_with[name]} (here {made_with[name]})" for name in names)


def _read_identity(path: Path) -> tuple[dict[str, Any], Versions]:
    """(the run's identity, the versions that it was started with). Raises ValueError or OSError."""
    stored = read_json(path / IDENTITY)
    if problem := wrong(stored, with_fields({"run_id": Text})):
        raise ValueError(problem)
    versions = stored.pop(MADE_WITH, {})
    return stored, versions if isinstance(versions, dict) else {}


def _unfinished(root: Path, identity: Mapping[str, Any], made_with: Versions) -> Iterator[Path]:
    """The folders of this identity that are to be finished, newest first (the time is part of the name, so ties are
    broken by it), then those whose process was killed before it wrote one."""
    run_id = run_id_of(identity)
    paths = [path for path in root.glob(f"*-{run_id}") if (path / IDENTITY).is_file()]
    for path in sorted(paths, key=lambda path: ((path / IDENTITY).stat().st_mtime_ns, path.name), reverse=True):
        try:
            stored, started_with = _read_identity(path)
            if stored != {"run_id": run_id, **identity}:
                continue
            if others := other_versions(started_with, made_with):
                warn(f"{path} was started with {others}: skipped")
            else:
                yield path
        except ValueError as error:
            warn(f"{path / IDENTITY} is damaged ({error}): its finished answers are not reused")
    newborn = {LOCK, f".{IDENTITY}.partial"}
    for path in sorted(root.glob(f"*-{run_id}")):
        if path.is_dir() and path not in paths and {entry.name for entry in path.iterdir()} <= newborn:
            yield path


def _acquire(path: Path) -> int | None:
    """A lock on the folder, held until its descriptor closes; None if it is held, or the run was tidied meanwhile."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if (path / DIGEST).exists() and not (path / IDENTITY).exists():
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
