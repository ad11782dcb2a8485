"""Journals that were cut, damaged or forged line by line: a resumed run equals an unbroken one, or is refused.

Forged lines carry a right CRC. They show by a wrong run, request, type, length, range or text. A forged
logprob that could be true cannot be told from a true one, for a check without a secret is no signature.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.engine.expected import ExpectedAnswer
from evalengine.errors import EvalEngineError
from evalengine.records.journal import Entry, Expected, Journal
from evalengine.records.schema import Answer, RecordKey, ids_sha256
from tests.fuzz.cases import Case, cases

RUN, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
VOCABULARY, ROOM = 1000, 6
TAIL = len(b',"crc":"00000000"}\n')


def text_of(ids: Sequence[int]) -> str:
    """A text that follows from the ids, as the text of a tokenizer does."""
    return " ".join(f"t{token}" for token in ids)


def answer(doc: int) -> Entry:
    """The unbroken run's answer to the document's request."""
    draw = np.random.default_rng(doc)
    ids = draw.integers(0, VOCABULARY, 1 + doc % ROOM).tolist()
    scored = doc % 3 == 0
    ended = "length" if scored or len(ids) == ROOM else "stop"
    values = -draw.random(len(ids), dtype=np.float32)
    told = Answer(ids, values, ended, "" if scored else text_of(ids), True)
    return ("t", doc, 0, 0), ids_sha256([doc]), told


def asked(doc: int) -> Expected:
    """What the run's plan says of the document's request; every third one is scored."""
    if doc % 3 == 0:
        return (ids_sha256([doc]), ExpectedAnswer(VOCABULARY, scored=[*answer(doc)[2].output_ids]).problem)
    return (ids_sha256([doc]), ExpectedAnswer(VOCABULARY, room=ROOM, said=text_of).problem)


DOCS = 8
PLAN: dict[RecordKey, Expected] = {("t", doc, 0, 0): asked(doc) for doc in range(DOCS)}
UNBROKEN = {key: answer(key[1])[2] for key in PLAN}


def same(entry: Answer, other: Answer) -> bool:
    """Whether two answers are equal, logprobs to the bit."""
    fields, other_fields = vars(entry).copy(), vars(other).copy()
    return bool(fields.pop("logprobs").tobytes() == other_fields.pop("logprobs").tobytes() and fields == other_fields)


def resume(path: Path) -> None:
    """Does what a run does: keeps what is finished and answers the rest; the result must be the unbroken run's."""
    with Journal.open(path, RUN, PLAN.get) as journal:
        for key in PLAN:
            if key not in journal.finished:
                journal.append(answer(key[1]))
        assert journal.finished.keys() == UNBROKEN.keys()
        assert all(same(entry, UNBROKEN[key]) for key, entry in journal.finished.items()), "a silently different run"
    with Journal.open(path, RUN, PLAN.get) as again:
        assert len(again.finished) == DOCS


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """The lines of an interrupted run's journal."""
    with Journal.open(tmp_path / "whole", RUN, PLAN.get) as journal:
        for doc in (3, 1, 0, 4, 2, 5):
            journal.append(answer(doc))
    return (tmp_path / "whole").read_bytes().splitlines(keepends=True)


def with_crc(start: bytes) -> bytes:
    """The journal's line that begins so, with its CRC."""
    return start + b',"crc":"%08x"}\n' % zlib.crc32(start)


def damage(lines: list[bytes], case: Case) -> bytes:
    """The journal with bytes or whole lines changed, and the CRCs left as they were."""
    how = case.choice(["flip", "cut", "insert", "delete line", "double line", "exchange lines", "empty line"])
    rows, number = [*lines], case.randrange(len(lines))
    data = bytearray(b"".join(rows))
    at = case.randrange(len(data))
    if how == "flip":
        data[at] ^= 1 << case.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data.insert(at, case.randrange(256))
    else:
        if how == "delete line":
            del rows[number]
        elif how == "double line":
            rows.insert(case.randrange(len(rows)), rows[number])
        elif how == "exchange lines":
            case.shuffle(rows)
        else:
            rows.insert(number, b"\n")
        data = bytearray(b"".join(rows))
    return bytes(data)


def wrong_value(name: str, value: Any, case: Case) -> Any:
    """Another value that no answer to the same request of the same run has."""
    if case.random() < 0.4:
        odd = [None, -1, 1.5, 10**30, [], {}, [None], [[1]], "\ud800", float("nan")]
        return case.choice([other for other in odd if type(other) is not type(value)])
    if name == "run":
        return case.choice([OTHER, RUN[:8], RUN.upper()])
    if name == "key":
        return case.choice([["t", DOCS + 1, 0, 0], ["u", *value[1:]], value[:3], [*value, 0], ["t", value[1], 1, 0]])
    if name == "prompt_sha256":
        return ids_sha256([DOCS + 1])
    if name == "output_ids":
        changed = [*value]
        changed[case.randrange(len(changed))] = case.choice([-1, VOCABULARY, 2**40, 1.0, True, (value[0] + 1) % 7])
        return case.choice([changed, value[:-1], [*value, 1], value * 7])
    if name == "logprobs":
        numbers = np.frombuffer(base64.b64decode(value), dtype="<f4").copy()
        numbers[case.randrange(len(numbers))] = case.choice([np.nan, np.inf, 0.5, 1e30])
        shorter, longer = base64.b64encode(numbers.tobytes()[:-4]), base64.b64encode(numbers.tobytes() + b"abcd")
        return case.choice([base64.b64encode(numbers.tobytes()), shorter, longer, value[:-1].encode(), b"=="]).decode()
    if name == "finish_reason":
        return {"stop": "length", "length": "stop"}[value] if case.random() < 0.5 else "error"
    return f"{value}!" if name == "text" else 1


def forge(lines: list[bytes], case: Case) -> tuple[bytes, str]:
    """The journal with one line of another value and a right CRC; and what was done, "" where the value is the same."""
    rows, number = [*lines], case.randrange(len(lines))
    body = json.loads(rows[number][:-TAIL] + b"}")
    name = case.choice([*body])
    if case.random() < 0.15:
        del body[name]
        done = f"no {name}"
    else:
        old = json.dumps(body[name])
        body[name] = wrong_value(name, body[name], case)
        done = f"{name} = {body[name]!r}" if json.dumps(body[name]) != old else ""
    rows[number] = with_crc(json.dumps(body, separators=(",", ":")).encode()[:-1])
    return b"".join(rows), done


def test_damage_resumes_as_unbroken_or_is_refused(tmp_path: Path, lines: list[bytes]) -> None:
    for case in cases("journal_damage", 250):
        data = damage(lines, case)
        path = tmp_path / "journal.jsonl"
        path.write_bytes(data)
        with case.named(data[:200]):
            try:
                resume(path)
            except EvalEngineError as error:
                assert str(path) in str(error) and "resume=never" in str(error)
                assert path.read_bytes() == data, "what is refused stays as it is"


def test_forged_lines_are_refused(tmp_path: Path, lines: list[bytes]) -> None:
    for case in cases("journal_forged", 400):
        data, done = forge(lines, case)
        if _unseen(done):
            continue
        path = tmp_path / "journal.jsonl"
        path.write_bytes(data)
        with case.named(done):
            try:
                resume(path)
            except EvalEngineError as error:
                assert "is not of this run" in str(error) and "resume=never" in str(error)
                continue
            assert not done, "a forged line was taken"


def _unseen(done: str) -> bool:
    """A stop may come at the very last token that there is room for, where the engine alone can say whether it did."""
    return done == "finish_reason = 'stop'"


def test_another_runs_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, OTHER, PLAN.get) as journal:
        journal.append(answer(1))
    with pytest.raises(EvalEngineError, match="names the run fedcba987654, and this one is 0123456789ab"):
        Journal.open(path, RUN, PLAN.get)


@pytest.mark.slow  # the same as above in a process of python -O
def test_forged_lines_are_refused_without_asserts(tmp_path: Path) -> None:
    """`python -O` takes assertions out of the program; nothing that refuses a line is one."""
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import tests.fuzz.test_journal as t; from tests.fuzz.cases import cases\n"
        "from evalengine.errors import EvalEngineError\n"
        "path = Path(sys.argv[1]) / 'j'\n"
        "with t.Journal.open(path, t.RUN, t.PLAN.get) as journal: [journal.append(t.answer(doc)) for doc in range(6)]\n"
        "lines, taken = path.read_bytes().splitlines(keepends=True), 0\n"
        "for case in cases('journal_optimized', 100):\n"
        "    data, done = t.forge(lines, case)\n"
        "    path.write_bytes(data)\n"
        "    try: t.Journal.open(path, t.RUN, t.PLAN.get).close()\n"
        "    except EvalEngineError: continue\n"
        "    taken += bool(done) and not t._unseen(done)\n"
        "print('asserts' if __debug__ else 'none', taken)\n"
    )
    command = [sys.executable, "-O", "-c", program, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "none 0\n", done.stderr
