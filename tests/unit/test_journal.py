"""The journal loses at most the line that was being written, and never reads a damaged one."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.engine.expected import ExpectedAnswer
from evalengine.errors import EvalEngineError
from evalengine.records.journal import Entry, Expected, Journal
from evalengine.records.schema import Answer, RecordKey
from tests.full_disk import Disk

RUN = "0123456789abcdef" * 4
ODD = np.array([0x80000000, 0x80000001, 0xFF800000, 0xC0490FDB], dtype=np.uint32).view(np.float32)
ASKED = "ab" * 32, ExpectedAnswer(2**31, room=200).problem


def entry(doc: int, text: str = "a\r\n\u2028\u0085 ü 🙂") -> Entry:
    return ("task/x", doc, 1, 2), "ab" * 32, Answer([1, 2, 3, 2**31 - 1], ODD, "stop", text, True)


def asked(count: int) -> dict[RecordKey, Expected]:
    """What the run asked of its first `count` documents."""
    return {("task/x", doc, 1, 2): ASKED for doc in range(count)}


def opened(path: Path, run: str = RUN) -> Journal:
    return Journal.open(path, run, asked(10).get)


def fill(path: Path, count: int) -> None:
    """A journal with answers for the first `count` documents."""
    with opened(path) as journal:
        for doc in range(count):
            journal.append(entry(doc))


def same(first: Answer, second: Answer) -> bool:
    """Whether two answers are equal, their logprobs byte by byte."""
    left, right = vars(first).copy(), vars(second).copy()
    return left.pop("logprobs").tobytes() == right.pop("logprobs").tobytes() and left == right


@pytest.mark.parametrize("count", [0, 1, 7])
def test_round_trip(tmp_path: Path, count: int) -> None:
    fill(tmp_path / "j", count)
    with opened(tmp_path / "j") as journal:
        assert list(journal.finished) == [("task/x", doc, 1, 2) for doc in range(count)]
        assert all(same(kept, entry(key[1])[2]) for key, kept in journal.finished.items())


def test_what_is_kept_elsewhere_has_no_line(tmp_path: Path) -> None:
    """A cache gives such answers again. A line would make them look as if this run had computed them."""
    with opened(tmp_path / "j") as journal:
        for doc in range(4):
            key, _, answer = entry(doc)
            journal.note(key, answer) if doc % 2 else journal.append(entry(doc))
        assert [key[1] for key in journal.finished] == [0, 1, 2, 3]
        journal.forget({entry(0)[0]})
        assert [key[1] for key in journal.finished] == [1, 2, 3]
        journal.append(entry(0))
    with opened(tmp_path / "j") as journal:
        assert [key[1] for key in journal.finished] == [2, 0]


def test_what_is_forgotten_is_as_if_it_had_not_finished(tmp_path: Path) -> None:
    fill(tmp_path / "j", 5)
    before = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    with opened(tmp_path / "j") as journal:
        journal.forget({entry(1)[0], entry(3)[0]})
        assert [key[1] for key in journal.finished] == [0, 2, 4]
        journal.append(entry(3))
    assert (tmp_path / "j").read_bytes() == b"".join([before[0], before[2], before[4], before[3]])
    with opened(tmp_path / "j") as journal:
        assert [key[1] for key in journal.finished] == [0, 2, 4, 3]


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
        with opened(path) as journal:
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
        opened(path)


def test_a_full_disk_fails_the_run_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "j"
    journal = opened(path)
    journal.append(entry(0))
    before = path.read_bytes()
    disk.room = 10
    with pytest.raises(EvalEngineError, match="No space left"):
        journal.append(entry(1), entry(2))
    assert path.read_bytes() == before and journal.finished.keys() == {entry(0)[0]}
    assert len(opened(path).finished) == 1


WRITER = """
import sys
from pathlib import Path
import numpy as np
from evalengine.records.journal import Journal
from evalengine.records.schema import Answer
with Journal.open(Path(sys.argv[1]), "0" * 64, {}.get) as journal:
    for doc in range(10**9):
        logprobs = np.full(200, -1, dtype=np.float32)
        journal.append((("t", doc, 0, 0), "ab" * 32, Answer([1] * 200, logprobs, "stop", "x" * 500, True)))
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
    with Journal.open(path, "0" * 64, {("t", doc, 0, 0): ASKED for doc in range(lines)}.get) as journal:
        assert len(journal.finished) == lines >= 21
        assert list(journal.finished) == [("t", doc, 0, 0) for doc in range(lines)]


def line(**changes: Any) -> bytes:
    """One whole line, its check right, with some of its members replaced."""
    body: dict[str, Any] = {
        "run": RUN,
        "key": ["task/x", 0, 1, 2],
        "prompt_sha256": "ab" * 32,
        "output_ids": [1, 2],
        "logprobs": base64.b64encode(np.float32([-1.5, -0.25]).tobytes()).decode(),
        "finish_reason": "stop",
        "text": "x",
        "is_greedy": True,
    }
    start = json.dumps({**body, **changes}, separators=(",", ":")).encode()[:-1]
    return start + b',"crc":"%08x"}\n' % zlib.crc32(start)


def packed(*values: float) -> str:
    """float32 numbers in the journal's base64."""
    return base64.b64encode(np.float32(values).tobytes()).decode()


FORGED: list[tuple[dict[str, Any], str]] = [
    ({"run": "f" * 64}, "names the run ffffffffffff, and this one is 0123456789ab"),
    ({"run": None}, "names the run None"),
    ({"key": ["task/x", 99, 1, 2]}, "the run has no request task/x, document 99"),
    ({"key": ["task/x", True, 1, 2]}, "its key is no task"),
    ({"key": {}}, "its key is no task"),
    ({"prompt_sha256": "cd" * 32}, "it answers another prompt"),
    ({"prompt_sha256": 5}, "prompt_sha256=5: must be 64 hex digits"),
    ({"output_ids": [1]}, "1 output ids and 2 logprobs"),
    ({"output_ids": [1, -2]}, r"output_ids\[1\]=-2: must be greater than or equal to 0"),
    ({"output_ids": [1, 2.0]}, r"output_ids\[1\]=2.0: must be a valid integer"),
    ({"output_ids": [1, 2**31]}, "between 0 and 2147483647"),
    ({"output_ids": "12"}, "output_ids='12': must be a valid list"),
    ({"output_ids": [], "logprobs": ""}, "0 output ids, where 1 to 200"),
    ({"output_ids": [1] * 201, "logprobs": packed(*[-1.0] * 201)}, "201 output ids, where 1 to 200"),
    ({"logprobs": packed(-1.0)}, "2 output ids and 1 logprobs"),
    ({"logprobs": packed(-1.0, float("nan"))}, "no logarithms of probabilities"),
    ({"logprobs": packed(-1.0, float("inf"))}, "no logarithms of probabilities"),
    ({"logprobs": packed(-1.0, 0.5)}, "no logarithms of probabilities"),
    ({"logprobs": "AAAA"}, "3 bytes, which no float32"),
    ({"logprobs": "no base64!"}, "Only base64 data"),
    ({"finish_reason": "error"}, "its finish reason is not that of its output"),
    ({"finish_reason": "length"}, "its finish reason is not that of its output"),
    ({"text": None}, "text=None: must be a valid string"),
    ({"text": "other"}, "its text is not that of its output ids"),
    ({"is_greedy": 1}, "is_greedy=1: must be true or false"),
]


@pytest.mark.parametrize(("changes", "why"), FORGED)
def test_a_line_with_a_right_check_that_is_not_this_runs_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    wanted = {("task/x", 0, 1, 2): ("ab" * 32, ExpectedAnswer(2**31, room=200, said=lambda ids: "x").problem)}
    path = tmp_path / "j"
    path.write_bytes(line())
    with Journal.open(path, RUN, wanted.get) as journal:
        assert len(journal.finished) == 1
    path.write_bytes(line(**changes))
    with pytest.raises(EvalEngineError, match=f"line 1 is not of this run: .*{why}.*; delete this file"):
        Journal.open(path, RUN, wanted.get)
    assert path.read_bytes() == line(**changes), "it may be worth something to its owner"


def test_a_request_answered_twice_and_a_scored_one_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(line() * 2)
    with pytest.raises(EvalEngineError, match=r"line 2 .* is in an earlier line"):
        opened(path)
    scored = {("task/x", 0, 1, 2): ("ab" * 32, ExpectedAnswer(2**31, scored=[1, 2]).problem)}
    path.write_bytes(line(finish_reason="length", text=""))
    with Journal.open(path, RUN, scored.get) as journal:
        assert len(journal.finished) == 1
    for changes in ({"output_ids": [1, 3]}, {"text": "x"}, {"finish_reason": "stop"}):
        path.write_bytes(line(**{"finish_reason": "length", "text": "", **changes}))
        with pytest.raises(EvalEngineError, match="scores other tokens"):
            Journal.open(path, RUN, scored.get)


@pytest.mark.parametrize("body", [b"[" * 5000, b'{"run":' + b"1" * 5000, b"{}"[:1], b"\xff"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(body + b',"crc":"%08x"}\n' % zlib.crc32(body))
    with pytest.raises(EvalEngineError, match="line 1 is not of this run"):
        opened(path)


def test_alternatives_come_back_and_are_held_against_what_was_asked(tmp_path: Path) -> None:
    ids, values = np.array([[7, 9], [4, 1]], dtype=np.int32), np.array([[-0.5, -1], [-0.25, -0.25]], dtype=np.float32)
    key, path = ("t", 0, 0, 0), tmp_path / "journal.jsonl"
    answer = Answer([7, 4], values[:, 0], "stop", "", True, top_ids=ids, top_logprobs=values)
    wanted = {key: ("ab" * 32, ExpectedAnswer(10, room=2, alternatives=2).problem)}
    with Journal.open(path, "cd" * 32, wanted.get) as journal:
        journal.append((key, "ab" * 32, answer))
    with Journal.open(path, "cd" * 32, wanted.get) as journal:
        read = journal.finished[key]
    assert same(read.without_top(), answer.without_top()) and read.top_ids is not None and read.top_logprobs is not None
    assert [part.tobytes() for part in (read.top_ids, read.top_logprobs)] == [ids.tobytes(), values.tobytes()]
    for other, message in (
        (("ab" * 32, ExpectedAnswer(10, room=2, alternatives=1).problem), "its alternatives are not 1 a token"),
        (
            ("ab" * 32, ExpectedAnswer(9, room=2, alternatives=2).problem),
            "its alternatives are no tokens of the model",
        ),
        (("ab" * 32, ExpectedAnswer(10, room=2).problem), "its alternatives are not 0 a token"),
    ):
        with pytest.raises(EvalEngineError, match=message):
            Journal.open(path, "cd" * 32, {key: other}.get)
    assert wanted[key][1](replace(answer, top_logprobs=values[:, ::-1])) is not None, "not in order"
    assert wanted[key][1](answer.without_top()) == "it has no alternatives"
