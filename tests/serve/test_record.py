"""`record=FOLDER`: a server's answers are a run, which `check`, `prove`, `compare`, `gate` and `report` read as any."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.engine.request import GenerateRequest, RequestOutput
from evalengine.errors import EvalEngineError
from evalengine.integrations.openai_server.recorder import RECEIPT, RUN, Recorder, ServedRun
from evalengine.records.journal import LineFile
from evalengine.records.schema import RequestRecord
from tests.e2e.command import Run, call
from tests.full_disk import Disk
from tests.serve.running import QUESTION, Running, running, wait_until

CHAT = [{"role": "user", "content": "What is 3 plus 4?"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": QUESTION, "max_tokens": 6, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": QUESTION, "max_tokens": 5, "n": 2, "stop": "=", "frequency_penalty": 1.5}),
    ("/v1/completions", {"prompt": "1 + 1 =", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 5, "stream": True, "response_format": {"type": "json_object"}},
    ),
]


@contextmanager
def recording(folder: Path, *words: str) -> Iterator[Running]:
    """A server that records below the folder, and finishes its run at its end."""
    with running(*words) as server:
        run = ServedRun.open(str(folder), "serve-tinymath", server.config, server.llm)
        server.server.recorder = Recorder(run)
        yield server
        run.finish()


def ask(server: Running, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    answers = [server.post(path, body) for path, body in asked]
    assert [answer.status_code for answer in answers] == [200] * len(answers), answers[-1].text
    return answers


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    with recording(folder) as server:
        answers = ask(server, ASKED)
        ask(server, ASKED[:2])  # an equal request is the same leaf
    (path,) = folder.iterdir()
    return Run(path), answers


def record_of(run: Run, item: str) -> RequestRecord:
    (found,) = [record for record in run.records if "/".join(map(str, record.key)) == item]
    return found


def test_every_answer_is_a_leaf_that_its_header_names(recorded: tuple[Run, list[Any]]) -> None:
    run, answers = recorded
    assert {answer.headers[RUN] for answer in answers} == {run.folder.name}
    items = [item for answer in answers for item in answer.headers[RECEIPT].split(", ")]
    assert len(items) == 5 == len({*items})
    first = record_of(run, items[0])
    said = answers[0].json()["choices"][0]
    assert first.text == said["text"]
    assert first.logprobs.tobytes() == np.array(said["logprobs"]["token_logprobs"], dtype=np.float32).tobytes()
    sampled = [record_of(run, item).text for item in items[1:3]]
    assert sampled == [choice["text"] for choice in answers[1].json()["choices"]]
    kinds = [record.kind for record in run.records]
    assert kinds.count("loglikelihood") == 1 and len(kinds) == 6, "the echo's prompt, and five answers"
    assert run.manifest["identity"]["harness"] == "serve" and run.manifest["counts"]["requests"] == 6
    assert {path.name for path in run.folder.iterdir()} & {"journal.jsonl", "identity.json", ".lock"} == set()


def test_check_computes_all_of_it_again(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    run, answers = recorded
    done = call("check", str(run.folder))
    assert done.code == 0 and "6 of 6 items" in done.out and "verdict: AGREES" in done.out, done.err
    item = answers[1].headers[RECEIPT].split(", ")[1]  # the second sample: its noise is named in the receipt
    receipt = tmp_path / "receipt.json"
    assert call("prove", str(run.folder), "--item", item, "-o", str(receipt)).code == 0
    checked = call("check", str(receipt), "--model", "asset:tinymath", "--digest", run.digest)
    assert checked.code == 0 and "every bit agrees" in checked.out, checked.out + checked.err


def test_an_edited_answer_is_found(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    copy = tmp_path / "edited"
    shutil.copytree(recorded[0].folder, copy)
    asked = copy / "asked.jsonl"
    asked.write_text(asked.read_text().replace('"max_tokens":6', '"max_tokens":7'))
    done = call("check", str(copy))
    assert done.code == 2 and "asked.jsonl: not the file that the run wrote" in done.err


def test_another_order_and_batch_is_the_same_run(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    with recording(tmp_path, "engine.max_num_seqs=1", "engine.max_num_batched_tokens=16") as server:
        ask(server, ASKED[::-1])
    (path,) = tmp_path.iterdir()
    assert Run(path).digest == recorded[0].digest
    done = call("compare", str(recorded[0].folder), str(path))
    assert done.code == 0 and "verdict: IDENTICAL" in done.out, done.out + done.err


def test_other_requests_are_another_run(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    with recording(tmp_path) as server:
        ask(server, ASKED[:3])
    (path,) = tmp_path.iterdir()
    refused = call("compare", str(recorded[0].folder), str(path))
    assert refused.code == 2 and "Only A ran chat" in refused.err
    allowed = call("compare", str(recorded[0].folder), str(path), "--allow")
    assert "verdict: IDENTICAL" in allowed.out, allowed.out + allowed.err


def test_a_gate_and_a_page_read_it(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    run, baseline = recorded[0], tmp_path / "baseline.json"
    assert call("baseline", str(run.folder), "-o", str(baseline)).code == 0
    done = call("gate", str(baseline), str(run.folder), "--policy", "bitwise")
    assert done.code == 0, done.out + done.err
    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy)
    assert call("report", str(copy)).code == 0
    assert "Arlo collects 45 flowers" in (copy / "report.html").read_text()


def test_a_killed_server_is_taken_up(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    """What was answered before the kill is kept; a line that was being written is not."""
    with running() as server:
        run = ServedRun.open(str(tmp_path), "serve-tinymath", server.config, server.llm)
        server.server.recorder = Recorder(run)
        ask(server, ASKED[:2])
        run.file.close()
        run.journal.close()
        run.folder.close()  # as a kill does
    (path,) = tmp_path.iterdir()
    with open(path / "asked.jsonl", "ab") as file:
        file.write(b'{"key":["completions",')
    assert "not finished" in call("check", str(path)).err
    with recording(tmp_path) as server:
        ask(server, ASKED[2:])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert Run(path).digest == recorded[0].digest
    assert Run(path).manifest["counts"]["resumed_requests"] == 3


def test_a_full_disk_costs_no_answer(
    recorded: tuple[Run, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Full and free again and again, then a kill: requests in between are answered 503, and nothing of them is kept."""
    path, body = ASKED[1]
    with monkeypatch.context() as patch, running() as server:
        disk = Disk(patch)
        run = ServedRun.open(str(tmp_path), "serve-tinymath", server.config, server.llm)
        server.server.recorder = Recorder(run)
        journal = run.journal.path
        ask(server, ASKED[:1])
        for room in (0, 7, 400, 800, 1200):  # within the request's line, that of its second sample, or an answer's
            disk.room = room
            before = journal.read_bytes()
            lost = server.post(path, body)
            assert (lost.status_code, lost.json()["error"]["type"]) == (503, "server_error"), room
            assert journal.read_bytes() == before and run.file.path.read_bytes()[-1:] == b"\n"
            unwell, computed = server.client.get("/health"), server.llm.stats.num_generated_tokens
            assert unwell.status_code == 503
            assert "answers cannot be recorded: No space left on device" in unwell.text
            for stream in (False, True):
                refused = server.post(path, {**body, "stream": stream})
                assert refused.status_code == 503 and str(tmp_path) not in refused.text
            assert server.llm.stats.num_generated_tokens == computed, "refused before it is computed"
            disk.room = 1 << 20
            assert server.client.get("/health").status_code == 200
            ask(server, ASKED[2:3])
        assert caplog.text.count("answers cannot be recorded") == 5 == caplog.text.count("answers are recorded again")
        disk.room = 0
        assert server.client.get("/health").status_code == 503, "without a request, too"
        run.file.close()
        run.journal.close()
        run.folder.close()  # as a kill does
    with recording(tmp_path) as server:
        ask(server, ASKED)
    (folder,) = tmp_path.iterdir()
    assert Run(folder).digest == recorded[0].digest and Run(folder).manifest["counts"]["resumed_requests"] == 3


def test_a_request_whose_answer_was_lost_is_no_part_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is there, and no answer: that ended with a KeyError, and asked again it was there twice."""
    with recording(tmp_path) as server:
        disk = Disk(monkeypatch)
        run = server.server.recorder.run  # type: ignore[union-attr]
        ask(server, ASKED[:1])
        monkeypatch.setattr(run.journal, "file", LineFile(run.journal.path))
        disk.room = 50
        stream = server.post(*ASKED[3])  # it has begun when its answer cannot be kept
        assert stream.status_code == 200 and '"type":"server_error"' in stream.text and "[DONE]" not in stream.text
        assert server.post(*ASKED[1]).status_code == 503
        disk.room = 1 << 20
        ask(server, ASKED[1:2])
        disk.room = 50
        assert server.post(*ASKED[2]).status_code == 503
        disk.room = 1 << 20
        ask(server, ASKED[2:3])
    (path,) = tmp_path.iterdir()
    assert [record.task for record in Run(path).records] == ["completions"] * 4 + ["prompts"]
    assert call("check", str(path)).code == 0


def test_a_machine_that_computes_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path) as server:
        ask(server, ASKED[:1])
        wait_until(lambda: not server.llm._lock.locked())  # else the next request joins the run of before
        right = server.server.engine.engine.run

        def wrong(*arguments: Any) -> Any:
            for output in right(*arguments):
                output.logprobs[0] = np.nextafter(output.logprobs[0], np.float32(0))
                yield output

        monkeypatch.setattr(server.server.engine.engine, "run", wrong)
        refused = server.post(*ASKED[0])
        assert refused.status_code == 500 and "could not be recorded" in refused.text
        monkeypatch.undo()


def test_two_prompts_under_one_key_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers may be equal, and then only the prompts differ."""
    output = RequestOutput(0, [7, 8], [5, 6], np.float32([-1, -2]), "length", "ab")
    with recording(tmp_path) as server:
        run = server.server.recorder.run  # type: ignore[union-attr]
        monkeypatch.setattr(
            "evalengine.integrations.openai_server.recorder.served_key", lambda *_: ("completions", 1, 0, 0)
        )
        for _ in range(2):
            run.add([("completions", GenerateRequest(0, [7, 8]), output)])
        with pytest.raises(EvalEngineError, match="the same request has another answer"):
            run.add([("completions", GenerateRequest(0, [7, 9]), output)])


def test_nothing_asked_leaves_nothing_and_fast_is_refused(tmp_path: Path) -> None:
    with recording(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    done = call("serve", f"record={tmp_path}", "batch_invariant=false", "engine.device=cpu", "port=0")
    assert done.code == 2 and "record: numerics=fast" in done.err


def test_a_damaged_list_of_what_was_asked_is_said(recorded: tuple[Run, list[Any]], tmp_path: Path) -> None:
    from evalengine.errors import ConfigError
    from evalengine.harness.requests import read_requests

    whole = (recorded[0].folder / "asked.jsonl").read_text().splitlines()
    line = json.loads(whole[0])
    for damaged in ("{", "[]", json.dumps({**line, "key": ["a", 1]}), json.dumps({**line, "prompt_ids": ["a"]}),
                    json.dumps({**line, "params": {"tempo": 1}}), f"{whole[0]}\n{whole[0]}"):  # fmt: skip
        (tmp_path / "asked.jsonl").write_text(f"{damaged}\n")
        with pytest.raises(ConfigError, match=r"asked\.jsonl: missing or damaged"):
            read_requests(tmp_path)
