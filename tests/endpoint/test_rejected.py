"""Requests that an endpoint rejects, and answers that are none: the rest is scored, and they are counted next to it."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import GroupConfig
from evalengine.integrations.endpoint import run as run_module
from evalengine.report.read.load import load_run
from tests.e2e.command import call
from tests.endpoint.asking import COUNT, ask, only, results
from tests.endpoint.fake import answered, scripted

CHAT = "apply_chat_template=true"
FILTERED = b'{"error": {"message": "flagged", "code": "content_filter"}}'
REFUSALS = [
    (400, FILTERED), (403, FILTERED), (422, b'{"detail": "no"}'), (200, FILTERED),
    (200, b'{"choices": [{"error": {"code": 403, "message": "flagged"}, "message": {"content": ""}}]}'),
]  # fmt: skip


def right(prompt: str) -> tuple[int, bytes]:
    return answered(str(sum(int(word) for word in prompt.split() if word.isdecimal())))


@pytest.mark.parametrize("refusal", REFUSALS, ids=[f"{status} {len(body)}" for status, body in REFUSALS])
def test_one_rejected_request_leaves_the_scores_of_the_others(
    tmp_path: Path, sums: list[str], refusal: tuple[int, bytes]
) -> None:
    sent = []

    def answer(prompt: str) -> tuple[int, bytes]:
        sent.append(prompt)
        return refusal if "What is 3" in prompt else right(prompt)

    with scripted(answer) as url:
        done = ask(url, sums, CHAT, "endpoint.repeats=2")
    assert done.code == 0, done.err
    assert len(sent) == 2 * COUNT, "a rejected request is not repeated"
    folder = only(tmp_path / "results")
    run, found = load_run(folder), results(folder)
    assert run.scores["sums", "exact_match", "none"] == {n: 1.0 for n in range(COUNT) if n != 3}
    assert found["results"]["sums"]["rejected"] == 1 and found["n-samples"]["sums"]["effective"] == COUNT - 1
    facts = found["endpoint"]
    assert facts["requests"] == 2 * COUNT - 2 and facts["noise"]["texts"]["of"] == COUNT - 1
    assert [(one["document"], one["ask"]) for one in facts["rejected"]["errors"]] == [(3, 0), (3, 1)]
    assert f"rejected 1 of {COUNT} documents, so no score includes them: status {refusal[0]}" in done.out
    assert "rejected      ↓" in done.out, done.out
    page = (folder / "report.html").read_text()
    assert "1 rejected" in page and f"rejected 1 of {COUNT} documents" in page


def test_runs_of_unequal_documents_are_compared(tmp_path: Path, sums: list[str]) -> None:
    with scripted(right) as url:
        assert ask(url, sums, CHAT).code == 0
    whole = only(tmp_path / "results").rename(tmp_path / "whole")
    with scripted(lambda prompt: (400, FILTERED) if "is 3" in prompt else right(prompt)) as url:
        assert ask(url, sums, CHAT).code == 0
    some = only(tmp_path / "results")
    for command in (["compare", "--level", "answers"], ["gate", "--policy", "accuracy"]):
        done = call(command[0], str(whole), str(some), *command[1:])
        assert done.code == 2 and f"A has {COUNT} requests, B {COUNT - 1}" in done.err, done.out + done.err
    done = call("compare", str(whole), str(some), "--level", "answers", "--allow")
    assert done.code == 0 and f"0 of {COUNT - 1} requests differ" in done.out, done.out


def test_all_rejected_is_an_error_and_rerunning_asks_again(
    tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, refused, ended = [], True, threading.Event()
    ended.set()

    def answer(prompt: str) -> tuple[int, bytes]:
        sent.append(prompt)
        if (
            len(sent) > 3
        ):  # The client counts replies while it sends: without this it may send all before it has counted.
            ended.wait(60)
        return (403, b'{"error": {"message": "no access"}}') if refused else right(prompt)

    with scripted(answer) as url:
        done = ask(url, sums, CHAT)
        assert done.code == 1 and f"rejected all of the first {COUNT} requests" in done.err and "no access" in done.err
        monkeypatch.setattr(run_module, "MOST_REJECTED", 3)
        sent.clear()
        ended.clear()
        done = ask(url, sums, CHAT, "endpoint.concurrency=1")
        ended.set()
        assert done.code == 1 and "rejected all of the first 3 requests" in done.err and len(sent) <= 4
        refused = False
        assert ask(url, sums, CHAT).code == 0
    assert load_run(only(tmp_path / "results")).results["sums", "exact_match", "none"][0] == 1.0


def test_a_task_that_is_rejected_as_a_whole_withholds_no_other_tasks_score(tmp_path: Path, sums: list[str]) -> None:
    (tmp_path / "two.yaml").write_text((tmp_path / "sums.yaml").read_text().replace("task: sums", "task: two").replace(
        '"{{question}}"', '"forbidden {{question}}"'))  # fmt: skip
    words = [f"task=[{tmp_path}/sums.yaml,{tmp_path}/two.yaml]", *sums[1:], CHAT]
    with scripted(lambda prompt: (400, FILTERED) if "forbidden" in prompt else right(prompt)) as url:
        (job,) = compose_jobs([*words, f"model.api={url}/v1"])
        aggregate = [{"metric": "exact_match"}]
        groups = {"both": GroupConfig(["sums", "two"], aggregate_metric_list=aggregate),
                  "one": GroupConfig(["sums"], aggregate_metric_list=aggregate)}  # fmt: skip
        folder = run_module.run(replace(job.config, groups=groups))
    words = results(folder)["endpoint"]["in_words"]
    assert any(f"two: the endpoint rejected {COUNT} of {COUNT} documents, so the task has no score" in word
               for word in words)  # fmt: skip
    assert {key[0]: value for key, (value, _) in load_run(folder).results.items()} == {"sums": 1.0, "one": 1.0}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "insufficient_quota: pay first", "type": "x"}}', "insufficient_quota: pay first"),
        (b'{"error": "out of memory", "choices": []}', "status 200 with an error: out of memory"),
        (
            b'{"object": "error", "message": "overloaded", "code": 503}',
            "status 200 with an error (code 503): overloaded",
        ),
        (b'{"detail": "no such route"}', "no such route"),
        (b'{"choices": [{"error": {"message": "upstream broke"}, "text": "1"}]}', "upstream broke"),
    ],
)
def test_an_error_in_a_response_of_status_200_is_reported(sums: list[str], body: bytes, words: str) -> None:
    with scripted(lambda prompt: (200, body)) as url:
        done = ask(url, sums, "limit=1", "endpoint.retries=0")
    assert done.code == 1 and words in done.err, done.err


def test_an_error_code_in_a_response_of_status_200_counts_as_a_status(tmp_path: Path, sums: list[str]) -> None:
    sent: list[str] = []

    def answer(prompt: str) -> tuple[int, bytes]:
        sent.append(prompt)
        return right(prompt) if len(sent) > 1 else (200, b'{"error": {"message": "slow down", "code": 429}}')

    with scripted(answer) as url:
        assert ask(url, sums, CHAT, "limit=1").code == 0 and len(sent) == 2
        body = b'{"error": {"message": "who are you", "code": 401}}'
    with scripted(lambda prompt: (200, body)) as url:
        done = ask(url, sums, CHAT, "limit=2")
    assert done.code == 1 and "who are you" in done.err and "EVALENGINE_API_KEY" in done.err


def test_answers_that_are_none_are_counted_next_to_the_score(tmp_path: Path, sums: list[str]) -> None:
    of_choice: dict[str, dict[str, Any]] = {
        "is 0": {"finish_reason": "content_filter"},
        "is 1": {"message": {"content": None, "reasoning_content": "so it is 3"}},
        "is 2": {"message": {"content": ""}},
        "is 3": {"message": {"content": "\n\nbehind the stop string"}},
    }

    def answer(prompt: str) -> tuple[int, bytes]:
        return answered("5", **next((own for name, own in of_choice.items() if name in prompt), {}))

    with scripted(answer) as url:
        done = ask(url, sums, CHAT, "endpoint.repeats=2")
    assert done.code == 0, done.err
    folder = only(tmp_path / "results")
    found = results(folder)
    counts = {"content_filter": 1, "null_content": 1, "empty_answer": 2}
    assert {name: found["results"]["sums"][name] for name in counts} == counts, "of the ask that is scored"
    assert found["endpoint"]["unanswered"] == {name: 2 * count for name, count in counts.items()}
    words = "2 content_filter, 2 null_content, 4 empty_answer: withheld or without a text"
    assert words in done.out and "null_content     ↓        1" in done.out, done.out
    page = (folder / "report.html").read_text()
    shown = "1 content_filter, 1 null_content, 2 empty_answer"
    assert words in page and shown in page
    assert call("baseline", str(folder), "--output", str(tmp_path / "baseline.json")).code == 0
    for first in (folder, tmp_path / "baseline.json"):
        compared = call("compare", str(first), str(folder), "--level", "answers")
        assert f"sums, exact_match, none: A {shown}; B {shown}." in " ".join(compared.out.split()), compared.out
    assert f"baseline {shown}; run {shown}" in call("gate", str(folder), str(folder), "--policy", "accuracy").out
    assert shown in " ".join(call("report", str(folder), "--table", "md").out.split())
    (file,) = folder.glob("samples_*.jsonl")
    rows = {row["doc_id"]: row.get("unanswered") for row in map(json.loads, file.read_text().splitlines())}
    assert rows == {0: {"content_filter": 1}, 1: {"null_content": 1}, 2: {"empty_answer": 1}, 3: {"empty_answer": 1},
                    **dict.fromkeys(range(4, COUNT))}  # fmt: skip


def test_an_answer_whose_thinking_did_not_end_gets_no_credit(tmp_path: Path, sums: list[str]) -> None:
    of_choice: dict[str, dict[str, Any]] = {
        "is 0": {},
        "is 1": {"finish_reason": "length"},
        "is 2": {"message": {"content": "5", "reasoning_content": "2 + 3"}},
        "is 3": {"message": {"content": ""}},
    }

    def answer(prompt: str) -> tuple[int, bytes]:
        text = json.loads(right(prompt)[1])["choices"][0]["message"]["content"]
        own = next((own for name, own in of_choice.items() if name in prompt), None)
        return answered(f"a sum</think>{text}") if own is None else answered(text, **own)

    settings = [*sums, CHAT, 'model.think_end_token="</think>"']
    with scripted(answer) as url:
        done, scored = ask(url, settings), ask(url, settings, "score_unfinished_thinking=true")
    assert done.code == scored.code == 0, done.err + scored.err
    without, given = (next(folder for folder in (tmp_path / "results").iterdir() if str(folder) in one.out)
                      for one in (done, scored))  # fmt: skip
    assert without != given
    values = {"sums": [0.0, 0.0, 1.0, 0.0, *[1.0] * (COUNT - 4)], "given": [1.0, 1.0, 1.0, 0.0, *[1.0] * (COUNT - 4)]}
    assert [*load_run(without).scores["sums", "exact_match", "none"].values()] == values["sums"]
    assert [*load_run(given).scores["sums", "exact_match", "none"].values()] == values["given"]
    found = results(without)["results"]["sums"]
    assert {"thinking_truncated": 1, "unended_thinking": 1, "empty_answer": 1}.items() <= found.items()
    words = "2 answers ended before the end of their thinking"
    assert f"{words} (no credit)" in done.out and f"{words} (scored as if they were answers)" in scored.out
    (file,) = without.glob("samples_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [rows[n]["thinking"] for n in (0, 1, 2, 4)] == [[""], ["4"], ["2 + 3"], ["a sum</think>"]]


def test_prompts_with_their_own_document_are_reported(tmp_path: Path, sums: list[str]) -> None:
    with scripted(right) as url:
        done = ask(url, sums, CHAT, "task.num_fewshot=4")
    assert done.code == 0, done.err
    own = results(only(tmp_path / "results"))["endpoint"]["own_exemplar_prompts"]
    assert 0 < own < COUNT and f"{own} of {COUNT} prompts contain their own document with its answer" in done.err
    assert f"{own} prompts contain their own document among the exemplars" in done.out


def test_a_change_of_model_is_reported(tmp_path: Path, sums: list[str]) -> None:
    def named(model: str) -> bytes:
        return json.dumps({**json.loads(answered("1")[1]), "model": model}).encode()

    with scripted(lambda prompt: (200, named("cheap" if "is 3" in prompt else "theirs"))) as url:
        done = ask(url, sums, CHAT)
    assert done.code == 0, done.err
    folder = only(tmp_path / "results")
    assert results(folder)["endpoint"]["models"] == {"theirs": COUNT - 1, "cheap": 1}
    words = f"the endpoint changed during the run: its model was theirs ({COUNT - 1}), cheap (1)"
    assert words in done.out and words in (folder / "report.html").read_text()
    with scripted(lambda prompt: (200, named("theirs-2026"))) as url:
        done = ask(url, sums, CHAT)
    assert "the endpoint named its model theirs-2026; theirs was requested" in done.out
