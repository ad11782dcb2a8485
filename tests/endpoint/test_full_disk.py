"""`answers.jsonl` on a disk that fills up: whole lines, one for each request, so that the run resumes."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalengine.endpoint import answers as answers_module
from evalengine.endpoint.answers import ANSWERS, Answer, AnswersFile
from evalengine.endpoint.received import Cleaner
from evalengine.errors import EvalEngineError
from tests.endpoint.asking import COUNT, ask, only
from tests.endpoint.fake import Fake
from tests.serve.running import serving

PLAIN = Cleaner(None)


class FullDisk:
    """An open file on a disk with this many free bytes. A write takes what fits; the next one raises ENOSPC."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken: int = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def filled(file: AnswersFile, room: int) -> FullDisk:
    disk = FullDisk(file._file, room)
    file._file = disk  # type: ignore[assignment]
    return disk


def answer(number: int) -> Answer:
    return Answer(f"answer {number} \u00fc", "stop", 1)


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = AnswersFile(tmp_path, PLAIN)
    file.append((0, 0), answer(0))
    whole = (tmp_path / ANSWERS).read_bytes()
    disk = filled(file, 0)
    for room in range(len(whole) - 1):  # wherever the disk is full within the next line, again and again
        disk.room = room
        with pytest.raises(EvalEngineError, match=r"No space left on device.*the same command again"):
            file.append((1, 0), answer(1))
        assert (tmp_path / ANSWERS).read_bytes() == whole and (1, 0) not in file.kept
    disk.room = 10_000
    file.append((1, 0), answer(1))
    file.append((2, 0), answer(2))
    file.close()
    read = AnswersFile(tmp_path, PLAIN)
    assert read.kept == file.kept == {(number, 0): answer(number) for number in range(3)}
    read.close()


def test_nothing_follows_a_line_that_could_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = AnswersFile(tmp_path, PLAIN)
    file.append((0, 0), answer(0))
    disk = filled(file, 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", fails)
        for number in (1, 2):
            with pytest.raises(EvalEngineError):
                file.append((number, 0), answer(number))
            disk.room = 10_000
    file.close()
    assert not (tmp_path / ANSWERS).read_bytes().endswith(b"\n")
    read = AnswersFile(tmp_path, PLAIN)
    assert read.kept == {(0, 0): answer(0)} and (tmp_path / ANSWERS).read_bytes().count(b"\n") == 1
    read.append((1, 0), answer(1))
    read.close()
    assert AnswersFile(tmp_path, PLAIN).kept == {(number, 0): answer(number) for number in (0, 1)}


def test_an_unfinished_line_is_removed_without_rewriting_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewriting it would lose every answer if the disk were still full."""
    file = AnswersFile(tmp_path, PLAIN)
    file.append((0, 0), answer(0))
    file.close()
    whole = (tmp_path / ANSWERS).read_bytes()
    with open(tmp_path / ANSWERS, "ab") as torn:
        torn.write(whole[:30])

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fails)
    assert AnswersFile(tmp_path, PLAIN).kept == {(0, 0): answer(0)}
    assert (tmp_path / ANSWERS).read_bytes() == whole


def test_a_second_answer_to_one_request_is_damage(tmp_path: Path) -> None:
    file = AnswersFile(tmp_path, PLAIN)
    file.append((0, 0), answer(0))
    file.close()
    (tmp_path / ANSWERS).write_bytes(2 * (tmp_path / ANSWERS).read_bytes())
    with pytest.raises(EvalEngineError, match="line 2: a second answer to request 0, ask 0"):
        AnswersFile(tmp_path, PLAIN)


def test_a_run_on_a_full_disk_is_resumed(tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(seconds=0)
    opened: Callable[..., Any] = open
    with serving(fake.app) as url:
        with monkeypatch.context() as patch:
            full = lambda *words, **options: FullDisk(opened(*words, **options), 700)  # noqa: E731
            patch.setattr(answers_module, "open", full, raising=False)
            done = ask(url, sums, "endpoint.concurrency=1")
        assert done.code == 1 and "No space left on device" in done.err, done.err
        file = only(tmp_path / "results") / ANSWERS
        stored = [json.loads(line)["number"] for line in file.read_text().splitlines()]
        assert 0 < len(stored) < COUNT
        fake.asked.clear()
        assert ask(url, sums).code == 0
    again = [n for n in stored if fake.asked[f"What is {n} + {n + 1 + n % 2} ?"]]
    assert not again, "stored answers are not requested again"
    lines = [json.loads(line)["number"] for line in file.read_text().splitlines()]
    assert sorted(lines) == list(range(COUNT)) and lines[: len(stored)] == stored
