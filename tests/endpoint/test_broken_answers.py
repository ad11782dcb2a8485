"""An endpoint whose answers are no HTTP, or break off: a reply with an error, and no thread that nobody hears of."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import pytest

from evalengine.config.schema import EndpointConfig
from evalengine.integrations.endpoint.answers import answer_of
from evalengine.integrations.endpoint.http import Client, Reply

OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
NO_TEXTS = ["5", "{}", '{"text": 5}', '{"message": "x"}', '{"message": {"content": [{"type": "text", "text": "7"}]}}']


def choices(choice: str) -> bytes:
    content = f'{{"choices": [{choice}]}}'
    return OK + f"Content-Length: {len(content)}\r\n\r\n{content}".encode()


ANSWERS = {
    "no status": b"NONSENSE\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "nothing": b"",
    "a chunk cut off": OK + CHUNKED + b'50\r\n{"choices"',
    "a chunk of no size": OK + CHUNKED + b"zz\r\n{}\r\n",
    "an error cut off": b"HTTP/1.1 500 Error\r\n" + CHUNKED + b'50\r\n{"error"',
    "a longer length": OK + b'Content-Length: 500\r\n\r\n{"choices": [',
    "a line without end": OK + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "a wait of no date": b"HTTP/1.1 503 Busy\r\nRetry-After: Fri, 99 Foo 99999\r\nContent-Length: 0\r\n\r\n",
    "no choices": choices(""),
    **{f"no text: {choice}": choices(choice) for choice in NO_TEXTS},
}


def read_request(connection: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n{}" not in received:
        received += connection.recv(65536)


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> str:
    """An endpoint that gives one answer, as bytes, and closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    request.addfinalizer(listener.close)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(request.param)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize("endpoint", ANSWERS.values(), ids=ANSWERS, indirect=True)
def test_an_answer_that_is_none_is_an_error_of_its_request(endpoint: str) -> None:
    reply = Client(endpoint, EndpointConfig(retries=0, timeout=30))._reply(0, {})
    assert reply.value is None and reply.error and not reply.for_all


@pytest.mark.parametrize(
    "endpoint", [choices('{"text": null}'), choices('{"message": {"content": null}}'), choices('{"message": {}}')],
    indirect=True,
)  # fmt: skip
def test_a_text_of_null_is_an_empty_answer(endpoint: str) -> None:
    reply = Client(endpoint, EndpointConfig(retries=0, timeout=30))._reply(0, {})
    assert answer_of(reply).text == ""


BODY = b'{"choices": [{"text": "1"}]}'
LATE = "no complete answer within endpoint.timeout=1 seconds"
DRIPS = {
    "a body": (OK + b"Content-Length: 28\r\n\r\n", BODY, LATE),
    "a head": (OK, b"X-Wait: " + b"a" * 500, LATE),
    "an error": (b"HTTP/1.1 503 Busy\r\nContent-Length: 5000\r\n\r\n", b"x" * 5000, "status 503: Busy"),
    "a refusal": (b"HTTP/1.1 401 No\r\nContent-Length: 5000\r\n\r\n", b"x" * 5000, "status 401: No"),
    "nothing": (b"", b"", LATE),
}


@pytest.mark.parametrize("drip", DRIPS.values(), ids=DRIPS)
def test_the_time_limit_is_of_a_whole_answer(drip: tuple[bytes, bytes, str]) -> None:
    """An endpoint that sends a byte every 0.1 s: no read takes as long as the limit of 1 s."""
    ended = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(drip[0])
            try:
                for byte in drip[1]:
                    time.sleep(0.1)
                    connection.sendall(bytes([byte]))
                connection.recv(1)
            except OSError:
                pass
            ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        url, begin = f"http://127.0.0.1:{listener.getsockname()[1]}/v1", time.monotonic()
        reply = Client(url, EndpointConfig(retries=0, timeout=1))._reply(0, {})
        assert 0.9 < time.monotonic() - begin < 2.5
        assert drip[2] in reply.error and not reply.rejected
        assert reply.for_all is ("401" in reply.error)
        assert ended.wait(5), "the connection is given up, too"


def test_the_time_limit_is_of_all_addresses_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of two addresses that accept no connection, and one that answers."""
    resolve = socket.getaddrinfo

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(choices('{"text": "1"}'))

    def ask() -> Reply:
        return Client("http://host.test/v1", EndpointConfig(retries=0, timeout=1))._reply(0, {})

    with ExitStack() as opened:
        full, listener = (opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=n)) for n in (0, 1))
        for _ in range(3):  # no more connections fit into its queue
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        ports = [full.getsockname()[1]] * 2
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **named: [
            resolve("127.0.0.1", port, type=socket.SOCK_STREAM)[0] for port in ports])  # fmt: skip
        reply = ask()
        assert LATE in reply.error and 0.9 < reply.seconds < 1.9, "two addresses take 2 s one after the other"
        threading.Thread(target=answer, daemon=True).start()
        ports.append(listener.getsockname()[1])
        assert answer_of(ask()).text == "1"


def test_what_a_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Client, number: int, body: object) -> Reply:
        raise RuntimeError("of the thread")

    monkeypatch.setattr(Client, "_reply", fails)
    with pytest.raises(RuntimeError, match="of the thread"):
        list(Client("http://127.0.0.1:1/v1", EndpointConfig()).ask([{}]))
