"""The journal loses at most the line that was being written, and never reads a damaged one."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evalengine.errors import EvalEngineError
from evalengine.harness.journal import Journal, JournalEntry

ODD = np.array([0x80000000, 0x7FC00001, 0xFF800000, 0xC0490FDB], dtype=np.uint32).view(np.float32)


def entry(doc: int, text: str = "a\r\n\u2028\u0085 ü 🙂") -> JournalEntry:
    return JournalEntry(("task/x", doc, 1, 2), "ab" * 32, [1, 2, 3, 2**31 - 1], ODD, "stop", text, True)


def fill(path: Path, count: int) -> None:
    with Journal.open(path) as journal:
        for doc in range(count):
            journal.append(entry(doc))


def same(one: JournalEntry, other: JournalEntry) -> bool:
    mine, theirs = vars(one).copy(), vars(other).copy()
    return mine.pop("logprobs").tobytes() == theirs.pop("logprobs").tobytes() and mine == theirs


@pytest.mark.parametrize("count", [0, 1, 7])
def test_round_trip(tmp_path: Path, count: int) -> None:
    fill(tmp_path / "j", count)
    with Journal.open(tmp_path / "j") as journal:
        assert list(journal.finished) == [("task/x", doc, 1, 2) for doc in range(count)]
        assert all(same(found, entry(found.key[1])) for found in journal.finished.values())


def test_alternatives_and_empty_outputs_round_trip(tmp_path: Path) -> None:
    alternatives: list[dict[int, float]] = [{5: -0.25, 7: -3.5}, {}]
    first = JournalEntry(("t", 0, 0, 0), "", [1, 2], ODD[:2], "length", "", False, alternatives)
    second = JournalEntry(("t", 1, 0, 0), "", [], ODD[:0], "stop", "", False)
    with Journal.open(tmp_path / "j") as journal:
        journal.append(first)
        journal.append(second)
    found = Journal.open(tmp_path / "j").finished
    assert same(found[first.key], first) and same(found[second.key], second)


def test_lines_are_json(tmp_path: Path) -> None:
    fill(tmp_path / "j", 2)
    assert [json.loads(line)["key"][1] for line in (tmp_path / "j").read_text().split("\n")[:-1]] == [0, 1]


def test_every_torn_end_keeps_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal.open(path) as journal:
            assert len(journal.finished) == 1, cut
            journal.append(entry(1))
        assert path.read_bytes() == whole, cut


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, 3)
    content = bytearray(path.read_bytes())
    content[content.index(b"\n") + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(EvalEngineError, match=r"line 2 is damaged.*resume=never"):
        Journal.open(path)


def test_a_full_disk_fails_the_run_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal = Journal.open(path)
    journal.append(entry(0))
    before = path.read_bytes()

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file
            self.calls = 0

        def write(self, data: bytes) -> int:
            self.calls += 1
            if self.calls > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data[:10])  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(journal, "_file", Full(journal._file))
    with pytest.raises(EvalEngineError, match="No space left"):
        journal.append(entry(1))
    assert path.read_bytes() == before
    assert len(Journal.open(path).finished) == 1


WRITER = """
import sys
from pathlib import Path
import numpy as np
from evalengine.harness.journal import Journal, JournalEntry
with Journal.open(Path(sys.argv[1])) as journal:
    for doc in range(10**9):
        logprobs = np.full(200, -1, dtype=np.float32)
        journal.append(JournalEntry(("t", doc, 0, 0), "", [1] * 200, logprobs, "stop", "x" * 500, True))
        if doc == 20:
            print("ready", flush=True)
"""


def test_kill_9_loses_at_most_the_line_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "j"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    lines = path.read_bytes().count(b"\n")
    with Journal.open(path) as journal:
        assert len(journal.finished) == lines >= 21
        assert list(journal.finished) == [("t", doc, 0, 0) for doc in range(lines)]
