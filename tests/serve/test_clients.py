"""What a client may do: keys, limits, leaving, stalling, and bodies that are no requests."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalengine import LLM
from evalengine.integrations.openai_server.settings import ServeSettings
from tests.e2e.command import ROOT, call, finish, start
from tests.serve.running import QUESTION, Running, running, wait_until

LONG = {"prompt": QUESTION, "max_tokens": 600, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """A server with a key and small limits."""
    bounds = ServeSettings(max_tokens=700, max_choices=4, max_open=2, max_body_mb=1, client_seconds=1)
    with running("engine.max_num_seqs=4", settings=bounds, api_key="secret", send_buffer=4096) as server:
        yield server


def key(value: str = "secret") -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def test_the_key_is_asked_for(strict: Running) -> None:
    for path in ("/v1/models", "/metrics", "/tokenizer_info"):
        assert strict.client.get(f"{path}").status_code == 401
        assert strict.client.get(f"{path}", headers=key()).status_code == 200
    assert strict.client.get("/health").json() == {"status": "ok"}
    for wrong in (key("secre"), key("secret2"), {"authorization": "secret"}, {"authorization": "Basic secret"}):
        refused = strict.post("/v1/completions", {"prompt": "a"}, **wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "a", "max_tokens": 701}, 400, "max_tokens=701: must be an integer from 0 to 700"),
        ({"prompt": "a", "n": 5}, 400, "n=5: must be an integer from 1 to 4"),
        ({"prompt": ["a", "b"], "n": 3}, 400, "at most 4"),
        ({"prompt": "a", "n": 3, "temperature": 1.0}, 429, "come back later"),
        ({"prompt": "a " * (1 << 20)}, 413, "longer than 1 MiB"),
        ({"prompt": "flower " * 2000}, 400, "may have 1024 tokens together: shorten it"),
        ({"prompt": ""}, 400, "makes no tokens"),
        ({"prompt": []}, 400, "requests nothing"),
        ({"prompt": [1 << 70]}, 400, "token ids must be in"),
        ({"prompt": [-1]}, 400, "token ids must be in"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "logprobs": 21}, 400, "from 0 to 20"),
        ({"prompt": "a", "max_tokens": 0}, 400, "requests nothing"),
        ({"prompt": "a", "stop": ""}, 400, "stop"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of: not built"),
        ({"prompt": "a", "tempreature": 1}, 400, "tempreature: no such field"),
        ({"prompt": "a", "model": "other"}, 404, "there is no model"),
        ({"max_tokens": 4}, 400, "prompt"),
        (["prompt"], 400, "must be a JSON object"),
        ({"prompt": "\ud800"}, 400, "surrogate"),
    ],
)
def test_what_cannot_be_honoured_is_said(strict: Running, body: Any, status: int, said: str) -> None:
    content = json.dumps(body)
    refused = strict.client.post("/v1/completions", content=content, headers=key())
    error = refused.json()["error"]
    assert refused.status_code == status and said in error["message"], refused.text
    assert {*error} == {"message", "type", "param", "code"}
    assert str(ROOT) not in refused.text and "Traceback" not in refused.text


def test_a_billion_choices_are_refused_before_a_list_is_made(strict: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It filled the memory, and ended the server."""
    monkeypatch.setattr("evalengine.integrations.openai_server.request_bodies.Choice", None)
    refused = strict.post("/v1/completions", {"prompt": ["a", "b"], "n": 500_000_000}, **key())
    assert refused.status_code == 400 and "n=500000000: must be" in refused.json()["error"]["message"]


def test_a_client_that_leaves_within_its_body_is_no_failure(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    gone = served.server.metrics.gone
    before = next(iter(gone.collect())).samples[0].value
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as client:
        client.sendall(_raw(LONG)[:-30])
    wait_until(lambda: next(iter(gone.collect())).samples[0].value == before + 1)
    assert "a request failed" not in caplog.text


def test_unknown_paths_and_methods_are_said(served: Running) -> None:
    assert served.client.get("/v1/embeddings").json()["error"]["message"] == "there is no such path here"
    assert served.client.get("/v1/completions").status_code == 405
    assert served.client.get("/docs").status_code == 404


def test_a_target_may_be_a_whole_uri(served: Running) -> None:
    """As a client sends it that takes the server for a proxy."""
    address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    for target, status in (("http://elsewhere:1/health", 200), ("HTTPS://x/v1/models?a=b", 200), ("http://x", 404)):
        with socket.create_connection(address) as client:
            client.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert client.recv(100).split()[1] == str(status).encode(), target


def test_a_client_that_leaves_is_freed(strict: Running) -> None:
    """Whole and streamed: the engine stops computing at once, and all pages are there again."""
    llm, engine = strict.llm, strict.server.engine
    for stream in (False, True):
        before = llm.stats.num_generated_tokens
        with socket.create_connection(("127.0.0.1", int(strict.url.rpartition(":")[2]))) as client:
            client.sendall(_raw({**LONG, "stream": stream}))
            wait_until(lambda before=before: llm.stats.num_generated_tokens > before + 2)
        wait_until(lambda: engine.num_open == 0 and not llm.scheduler.has_work)
        assert llm.stats.num_generated_tokens - before < 590, "it ran on to the end"
        assert llm.block_manager.num_free_blocks == llm.num_kv_blocks
    assert "evalengine_clients_gone_total 2.0" in strict.client.get("/metrics", headers=key()).text


def test_a_client_that_stalls_is_freed(strict: Running) -> None:
    """One sends half a body; one takes nothing of a long answer."""
    port = int(strict.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(_raw(LONG)[:-30])
        client.settimeout(20)
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # to the end: the connection is closed
        assert b"408" in answer.split(b"\r\n")[0]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        big = {**LONG, "logprobs": 20, "stream": True}
        client.sendall(_raw(big))
        before = strict.llm.stats.num_generated_tokens
        wait_until(lambda: strict.server.engine.num_open == 1)
        wait_until(lambda: strict.server.engine.num_open == 0, 60)
        assert strict.llm.stats.num_generated_tokens - before < 590, "it ran on to the end"


def _raw(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Authorization: Bearer secret",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join([*head, "", ""]).encode() + content


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "logprobs", "echo", "stream",
          "stop_token_ids", "prompt_logprobs", "min_tokens", "repetition_penalty", "messages", "tools", "top_logprobs",
          "chat_template_kwargs", "stream_options", "response_format", "tokens")  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), changed=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_malformed_bodies_are_answered(served: Running, path: str, changed: dict[str, Any]) -> None:
    """A mutated request is answered or refused in OpenAI's shape; the server lives on."""
    usual: dict[str, Any] = {
        "/v1/completions": {"prompt": "1 + 1 =", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }
    body = {**usual[path], **changed}
    if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 4:
        body["max_tokens"] = 4
    content = json.dumps(body)
    answer = served.client.post(f"{path}", content=content)
    assert answer.status_code in (200, 400, 413, 429), f"{content}: {answer.text}"
    if answer.status_code != 200:
        assert {*answer.json()["error"]} == {"message", "type", "param", "code"}
        assert "Traceback" not in answer.text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}', b"1" * 5000, b"null"])
def test_bodies_that_are_no_json(served: Running, content: bytes) -> None:
    answer = served.client.post("/v1/completions", content=content)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_failing_engine_is_said_and_lives_on(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: not served.llm._lock.locked())
    runner = served.llm.runner
    assert runner is not None
    with monkeypatch.context() as broken:
        broken.setattr(runner, "launch", lambda schedule: (_ for _ in ()).throw(RuntimeError("lost at /secret/path")))
        failed = served.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert served.client.get("/health").status_code == 503
    assert failed.status_code == 500 and "/secret" not in failed.text
    assert served.completion(prompt="a", max_tokens=2)["choices"]
    assert served.client.get("/health").status_code == 200


def test_an_engine_that_has_ended_answers_no_one_and_says_so() -> None:
    """Those who wait when its thread dies, whole and streamed, and those who come later."""
    with running() as server:
        bodies = [{**LONG, "stream": stream} for stream in (False, True)]
        with ThreadPoolExecutor() as clients:
            waiting = [clients.submit(server.post, "/v1/completions", body) for body in bodies]
            wait_until(lambda: server.server.engine.num_open == 2)
            server.llm.scheduler.schedule = lambda: sys.exit("no step ends so")  # type: ignore[method-assign]
            whole, streamed = (one.result() for one in waiting)
        assert whole.status_code == 500 and whole.json()["error"]["type"] == "server_error"
        assert '"type":"server_error"' in streamed.text and "[DONE]" not in streamed.text
        assert server.post("/v1/completions", LONG).status_code == 503
        assert server.client.get("/health").status_code == 503


def test_a_client_that_takes_nothing_keeps_no_server_from_ending() -> None:
    process = start("serve", "client_seconds=1", "port=0", "engine.device=cpu", "engine.num_kv_blocks=64")
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
        big = {"prompt": [QUESTION * 25] * 8, "max_tokens": 0, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(_raw(big))
            client.recv(100)  # the rest is more than the system holds for a client
            process.terminate()
            done = finish(process, 60)
        assert done.code == 0 and "ending once the answers that run are finished" in done.err
    finally:
        process.kill()


def test_the_words_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (["port=99999"], "port=99999: must be less than or equal to 65535"),
        (["task=gsm8k"], "task: no setting of a server"),
        (["max_open=0"], "max_open=0: must be greater than or equal to 1"),
        (["tinymath"], "settings are written name=value"),
        (["host=256.1.1.1"], "host=256.1.1.1 port=8000"),
        (["--api-key", " "], "--api-key"),
    ):
        done = call("serve", *words)
        assert done.code == 2 and said in done.err, done.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = call("serve", f"port={taken.getsockname()[1]}")
        assert done.code == 2 and "in use" in done.err
    monkeypatch.setattr("evalengine.util.plugins.find_spec", lambda name: None)
    done = call("serve", "model=tinymath")
    assert done.code == 2 and "pip install 'evalengine[serve]'" in done.err


def test_dropped_sequences_leave_the_scheduler(make_small: LLM) -> None:
    """The scheduler's own part, without a server: what waits and what runs, and whoever shares neither."""
    from evalengine.engine.request import GenerateRequest, SamplingParams, ScoreRequest

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests: list[Any] = [GenerateRequest(i, [5 + i, 6, 7], params) for i in range(4)]
    requests += [ScoreRequest(4, [9, 8], [7, 6]), ScoreRequest(5, [9, 8], [6])]
    expected = {output.request_id: output.token_ids for output in make_small.run(requests)}
    steps = 0

    def more() -> list[Any]:
        nonlocal steps
        steps += 1
        if steps == 4:
            make_small.scheduler.drop({0, 3, 4})
        return []

    outputs = {output.request_id: output.token_ids for output in make_small.run(requests, more=more)}
    assert outputs == {number: expected[number] for number in outputs} and {1, 2, 5} <= outputs.keys()
    assert not {0, 3} & outputs.keys()
    assert make_small.block_manager.num_free_blocks == make_small.num_kv_blocks


@pytest.fixture
def make_small() -> Iterator[LLM]:
    with LLM("asset:tinymath", device="cpu", num_kv_blocks=16, block_size=64, max_num_seqs=2) as llm:
        yield llm
