"""`LineFile` on a disk that fills up: whole lines, none twice, and nothing behind an unfinished one."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.errors import EvalEngineError
from evalengine.records.journal import PROBE, LineFile
from tests.full_disk import Disk

LINES = [b"a line of some length\n", b"two\nlines\n", b"the last\n"]


def test_lines_are_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "lines"
    file = LineFile(path)
    for number, lines in enumerate(LINES):
        for room in range(len(lines)):  # wherever the disk is full within them, again and again
            disk.room = room
            with pytest.raises(EvalEngineError, match=rf"could not write {path}: No space left on device"):
                file.append(lines)
            assert path.read_bytes() == b"".join(LINES[:number]) and disk.room == room
        disk.room = len(lines)
        file.append(lines)
    file.close()
    file.close()
    assert path.read_bytes() == b"".join(LINES) and LineFile(path).size == file.size == len(b"".join(LINES))


def test_nothing_follows_a_line_that_could_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "lines"
    file = LineFile(path)
    file.append(LINES[0])
    disk.room, disk.broken = 5, True
    with pytest.raises(EvalEngineError, match="No space left on device"):
        file.append(LINES[1])
    disk.room = 1000
    with pytest.raises(EvalEngineError, match="Input/output error"):
        file.append(LINES[2])
    assert path.read_bytes() == LINES[0] + LINES[1][:5]
    disk.broken = False
    file.append(LINES[2])
    assert path.read_bytes() == LINES[0] + LINES[2]


@pytest.mark.parametrize("size", [None, len(LINES[0])])
def test_what_a_killed_process_left_is_removed(size: int | None, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(LINES[0] + b"unfinished")
    file = LineFile(tmp_path / "lines", size)
    assert (tmp_path / "lines").read_bytes() == LINES[0]
    file.append(LINES[2])
    assert (tmp_path / "lines").read_bytes() == LINES[0] + LINES[2]


def test_an_interrupted_append_leaves_no_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch)
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append(LINES[0])

    def interrupted(self: object, data: bytes) -> int:
        with open(path, "ab") as same:
            same.write(data[:4])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(file._file), "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.append(LINES[1])
    file.append(LINES[2])
    assert path.read_bytes() == LINES[0] + LINES[2]


def test_a_problem_lasts_until_what_failed_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "lines"
    file, long = LineFile(path), b"x" * 3 * PROBE + b"\n"
    file.append(LINES[0])
    disk.room = 2 * PROBE
    assert file.problem() is None
    with pytest.raises(EvalEngineError):
        file.append(long)
    assert file.problem() == "No space left on device" and path.read_bytes() == LINES[0]
    disk.room += 2 * PROBE
    assert file.problem() is None and file.lacking == 0 and path.read_bytes() == LINES[0]
    disk.room = PROBE - 1
    assert file.problem() == "No space left on device", "not even a page"
