"""The server over sockets: mutated bodies and broken connections. An answer is 200 or an error that the client made, in
OpenAI's form; nothing of it is a failure of the server, or keeps others waiting."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from evalengine.integrations.openai_server.connections import Connections
from evalengine.integrations.openai_server.recorder import Recorder, ServedRun
from evalengine.integrations.openai_server.settings import ServeSettings
from tests.fuzz.cases import Case, cases
from tests.fuzz.test_hf_folder import VALUES, mutated, places_in
from tests.serve.running import Running, running, serving, wait_until

SECONDS = 20  # for one answer, which takes milliseconds
HEALTHY_SECONDS = 2
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAMPLED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "n": 2, "stop": ["\n", "="], "max_tokens": 3,
    "stop_token_ids": [3], "min_tokens": 1, "repetition_penalty": 1.1, "user": "me", "model": "tinymath",
}  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": "45 flowers", **SAMPLED, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    (COMPLETION, {"prompt": [[5, 6], [7]], "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}),
    (COMPLETION, {"prompt": ["1 + 1 =", "\u20ac"], "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 0, "suffix": "", "best_of": 1}),
    (CHAT, {"messages": MESSAGES, **SAMPLED, "logprobs": True, "top_logprobs": 2, "tool_choice": "none"}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 2, "stream": True, "response_format": {"type": "text"}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {}}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": True, "metadata": {"a": "b"}}),
    ("/tokenize", {"prompt": "45 flowers", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(settings=ServeSettings(max_tokens=4, max_choices=8, max_body_mb=1)) as server:
        yield server


def damaged(case: Case, content: bytes) -> bytes:
    """The body with some bytes changed, in another encoding, or cut short."""
    at = case.randrange(len(content))
    return case.choice([
        content[:at],
        content[:at] + bytes([case.randrange(256)]) + content[at + 1 :],
        content[:at] + bytes(case.choices(range(256), k=3)) + content[at:],
        content[:at] + content[at:] * 2,
        content.decode().encode(case.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7"])),
        content.replace(b'":', b'":' + b"[" * case.choice([1, 300, 3000]), 1),
    ])  # fmt: skip


def with_odd_value(case: Case, path: str, body: dict[str, Any]) -> bytes:
    """The body with one value replaced by another one, that of another body, or a list of many; or with a new field."""
    places = list(places_in(body))
    _, other = case.choice([one for one in BODIES if one[0] == path])
    name = case.choice([*other, "unknown"])
    changed = case.choice([
        lambda: mutated(json.dumps(body), case.choice(places), case.choice(VALUES)),
        lambda: json.dumps({**body, name: other.get(name, 1)}),
        lambda: json.dumps({**body, name: [other.get(name)] * case.choice([0, 1, 9, 2000])}),
        lambda: json.dumps({**body, name: case.choice([body, 10**4000, -(2**63) - 1, "x" * 70_000, [[[]]]])}),
    ])  # fmt: skip
    return changed().encode("utf-8", "surrogatepass")


def is_error_of_the_client(status: int, content: str) -> bool:
    error = json.loads(content)["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["message"].isprintable(), content
    assert error["param"] is None or isinstance(error["param"], str)
    return 400 <= status < 500


def check_healthy(client: httpx.Client) -> None:
    begin = time.monotonic()
    assert client.get("/health").status_code == 200
    assert time.monotonic() - begin < HEALTHY_SECONDS, "others wait"


def test_bodies_are_answered_or_refused(served: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = answered = 0
    run = ServedRun.open(str(tmp_path), "fuzz", served.config, served.llm)
    served.server.recorder = Recorder(run)
    with caplog.at_level(logging.WARNING):
        for case in cases("served bodies", 200):
            path, body = case.choice(BODIES)
            content = with_odd_value(case, path, body)
            if case.random() < 0.3:
                content = damaged(case, content)
            caplog.clear()
            with case.named((path, content[:300])):
                answer = served.client.post(path, content=content, timeout=SECONDS)
                if answer.status_code != 200:
                    assert is_error_of_the_client(answer.status_code, answer.text), answer.text
                    refused += 1
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
                else:
                    assert answer.json()
                    answered += 1
                assert not caplog.records, caplog.text
                check_healthy(served.client)
    wait_until(lambda: served.server.engine.num_open == 0)
    served.server.recorder = None
    assert refused and answered and run.finish() is not None


WRONG_LINES = ["GET  / HTTP/1.1", "POST /v1/completions", "* * *", "GET http:// HTTP/1.1", "OPTIONS * HTTP/1.1",
               "GET /\xff HTTP/1.1", "CONNECT x:1 HTTP/1.1", "GET //x/health HTTP/1.1", "PRI * HTTP/2.0"]  # fmt: skip
WRONG_FIELDS = [
    "Content-Length: 5", "Content-Length: -1", "Content-Length: 1e3", f"Content-Length: {10**30}", "no colon", ": ",
    "Transfer-Encoding: gzip", "Expect: 100-continue", "X: " + "a" * 70_000, "X\0: y", "Host: y", "Upgrade: websocket",
]  # fmt: skip
GARBAGE = [b"\x16\x03\x01" + bytes(200), b"\r\n" * 500, b"\0" * 9, bytes(range(256)), b"\xff" * 100_000]


def in_chunks(content: bytes, size: int) -> list[bytes]:
    return [content[at : at + size] for at in range(0, len(content), size)]


def request(case: Case, valid: bool, last: bool) -> bytes:
    """One request; with a mistake in its head, unless it is to be valid. last: after it the server is to close."""
    path, body = BODIES[case.choice([1, 3, 8, 10])]
    content = json.dumps(body).encode()
    head = [f"POST {case.choice(['', 'http://x', 'HTTP://[::1]:80'])}{path} HTTP/1.1", "Host: x"]
    if case.random() < 0.3:
        head.append("Transfer-Encoding: chunked")
        content = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*in_chunks(content, 9), b""])
    else:
        head.append(f"Content-Length: {len(content)}")
    head += ["Connection: close"] * last
    if not valid and case.random() < 0.3:
        head[0] = case.choice(WRONG_LINES)
    elif not valid:
        head.insert(case.choice([1, 2, 3]), case.choice(WRONG_FIELDS))
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + content


def answers_of(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    received = b""
    with suppress(OSError):
        while part := client.recv(1 << 16):
            received += part
    return received


def test_connections_of_any_kind_harm_no_other(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    connections = Connections(50, client_seconds=5)
    with (
        caplog.at_level(logging.ERROR),
        serving(served.server.app, connections=connections) as url,
        httpx.Client(base_url=url, timeout=SECONDS) as others,
        ExitStack() as begun,
    ):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for case in cases("served connections", 100):
            count, valid = case.choice([1, 1, 2, 5]), case.random() < 0.3
            content = b"".join(request(case, valid, number == count) for number in range(1, count + 1))
            ending = "whole" if valid else case.choice(["whole", "half", "garbage", "slow", "reset"])
            if ending == "garbage":
                content = case.choice([*GARBAGE, content + case.choice(GARBAGE)])
            elif ending != "whole":
                content = content[: case.randrange(len(content))]
            with case.named((ending, content[:300])):
                client = begun.enter_context(socket.create_connection(address, timeout=SECONDS))
                with suppress(OSError):  # the server may close before it has read all
                    for part in in_chunks(content, 1 << 20 if ending != "slow" else 500):
                        client.sendall(part)
                if ending == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()
                elif ending != "slow":  # it stays open
                    if not valid:  # to the server a client that sends no more has left
                        with suppress(OSError):
                            client.shutdown(socket.SHUT_WR)
                    received = answers_of(client)
                    assert b"HTTP/1.1 5" not in received, received
                    assert not valid or received.count(b"HTTP/1.1 200 OK\r\n") == count, received
                check_healthy(others)
                assert not caplog.records, caplog.text
    wait_until(lambda: not connections.protocols)
