"""A disk that fills up, for files that `LineFile` opens."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from evalengine.records import journal


class Disk:
    """A disk with `room` free bytes. A write takes what fits; the next one raises ENOSPC."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int = 1 << 30) -> None:
        self.room, self.broken = room, False  # broken: nothing can be removed either
        patch.setattr(journal, "open", self._open, raising=False)

    def _open(self, path: Path, mode: str, buffering: int) -> Any:
        return _File(self, open(path, mode, buffering))


class _File:
    def __init__(self, disk: Disk, file: Any) -> None:
        self._disk, self._file = disk, file

    def write(self, data: bytes) -> int:
        if not self._disk.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken: int = self._file.write(data[: self._disk.room])
        self._disk.room -= taken
        return taken

    def truncate(self, size: int) -> None:
        if self._disk.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._disk.room += os.fstat(self._file.fileno()).st_size - size
        self._file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
