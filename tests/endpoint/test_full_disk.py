"""`answers.jsonl` on a disk that fills up: whole lines, one for each request, so that the run resumes."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import errno
import json
import os
from pathlib import Path

import pytest

from evalengine.errors import EvalEngineError
from evalengine.integrations.endpoint.answers import ANSWERS, AnswersFile, EndpointAnswer
from evalengine.integrations.endpoint.http import Cleaner
from tests.endpoint.asking import COUNT, ask, only
from tests.endpoint.fake import Fake
from tests.full_disk import Disk
from tests.serve.running import serving

PLAIN = Cleaner(None)


def answer(number: int) -> EndpointAnswer:
    return EndpointAnswer(f"answer {number} \u00fc", "stop", 1)


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
    assert AnswersFile(tmp_path, PLAIN).stored == {(0, 0): answer(0)}
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
    with serving(fake.app) as url:
        with monkeypatch.context() as patch:
            Disk(patch, room=700)
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
