"""`LineFile`: a file that is appended to in whole lines; a failed append, as on a full disk, changes nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from evalengine.records.folder import write_failed

PROBE = 4096  # bytes, a page of most file systems


class LineFile:
    """A file of whole lines, open for more. Each append is one unbuffered write.

    Lines that the disk does not take whole are removed again. A killed process leaves at most an unfinished last line.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        """size: bytes of whole lines that the file has (default: up to its last newline); what follows them is removed.
        Raises OSError."""
        if size is None:
            size = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self.path, self.size = path, size
        self.lacking = 0  # bytes that the disk did not take when they were last appended; 0 if it did
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._longer = True  # whether the file may have more bytes than `size`
        self._shorten()

    def append(self, lines: bytes) -> None:
        """Adds whole lines. Raises EvalEngineError if the disk fails; the file then has none of them."""
        try:
            self._write(lines)
        except OSError as error:
            self.lacking = len(lines)
            raise write_failed(self.path, error) from error
        self.size += len(lines)
        self._longer, self.lacking = False, 0

    def problem(self) -> str | None:
        """Why nothing can be appended now; None if what the disk did not take last, and a page, has room. It is written
        and removed again."""
        try:
            self._write(b" " * max(self.lacking, PROBE))
            self._shorten()
        except OSError as error:
            return error.strerror or str(error)
        self.lacking = 0
        return None

    def close(self) -> None:
        """Forces the lines to disk and closes the file; further calls do nothing. Raises EvalEngineError if the disk
        fails."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error) from error
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        """Writes behind the whole lines. Raises OSError if the disk does not take all of it."""
        self._shorten()  # no line may follow an unfinished one, where that could not be removed before
        self._longer = True
        try:
            written = 0
            while written < len(content):  # a full disk takes a part, and reports an error at the next write
                written += self._file.write(content[written:]) or 0
        except BaseException:  # Ctrl-C, too
            with suppress(OSError):
                self._shorten()
            raise

    def _shorten(self) -> None:
        if self._longer:
            self._file.truncate(self.size)
            self._longer = False
