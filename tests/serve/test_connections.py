"""Connections that say nothing, or take nothing, lock no other client out."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import errno
import json
import logging
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from evalengine.errors import ConfigError
from evalengine.integrations.openai_server.app import Server
from evalengine.integrations.openai_server.connections import SPARE, Connections, Door, most_connections, quiet_accept
from evalengine.integrations.openai_server.settings import ServeSettings
from tests.e2e.command import finish, start
from tests.serve.running import Running, serving, wait_until

HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHo"
Slow = Callable[[int], Callable[[], httpx.Response]]
REST = b"st: x\r\n\r\n"


@contextmanager
def guarded(
    served: Running, most: int = 4, client_seconds: float = 60, send_buffer: int | None = None
) -> Iterator[tuple[Connections, int]]:
    """A second server of the engine, with these bounds: its connections and port."""
    connections = Connections(most, client_seconds)
    server = Server(served.server.model, served.server.engine, ServeSettings(), None)
    with serving(server.app, send_buffer, connections) as url:
        yield connections, int(url.rpartition(":")[2])


def connect(port: int, said: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(said)
    return client


def ask(port: int, path: str = "/health") -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60)


def is_closed(client: socket.socket) -> bool:
    """Whether the server closes the connection within a minute."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def slow(served: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """`slow(port)` posts a completion, which is in progress until the answer to one of them is called for."""
    go_on, encoded = threading.Event(), served.server.model.encoded

    def wait(text: str, add_special_tokens: bool = True) -> list[int]:
        assert go_on.wait(60)
        return encoded(text, add_special_tokens)

    monkeypatch.setattr(served.server.model, "encoded", wait)
    with ThreadPoolExecutor(3) as pool:

        def post(port: int) -> httpx.Response:
            body = {"prompt": "a", "max_tokens": 1}
            return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)

        def start(port: int) -> Callable[[], httpx.Response]:
            future = pool.submit(post, port)

            def answer() -> httpx.Response:
                go_on.set()
                return future.result()

            return answer

        try:
            yield start
        finally:
            go_on.set()


@pytest.mark.parametrize("said", [b"", HALF_A_HEAD], ids=["nothing", "half a head"])
def test_silent_connections_lock_nobody_out(served: Running, said: bytes) -> None:
    with guarded(served) as (connections, port), ExitStack() as clients:
        silent = []
        for _ in range(30):
            silent.append(clients.enter_context(connect(port, said)))
            assert ask(port).status_code == 200
        assert len(connections.descriptors) <= 4 and is_closed(silent[0])


def test_a_burst_of_silent_connections(served: Running) -> None:
    """They are accepted in one turn of the event loop, before any of them has a protocol."""
    with guarded(served) as (connections, port), ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(connect(port))
        assert ask(port).status_code == 200
        wait_until(lambda: len(connections.descriptors) <= 4)


def test_a_request_in_progress_is_not_closed(served: Running, slow: Slow) -> None:
    """Where every connection has one, a new client is answered 503; one that says nothing gives its place up."""
    with guarded(served, most=2) as (connections, port), ExitStack() as clients:
        first = slow(port)
        wait_until(lambda: any(not protocol.is_idle for protocol in [*connections.protocols]))
        silent = clients.enter_context(connect(port))
        wait_until(lambda: len(connections.protocols) == 2)
        second = slow(port)
        assert is_closed(silent)
        wait_until(lambda: sum(not protocol.is_idle for protocol in [*connections.protocols]) == 2)
        refused = ask(port)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "server_error" and "too many connections" in refused.text
        assert [first().status_code, second().status_code] == [200, 200]
        assert ask(port).status_code == 200


def test_a_connection_that_had_a_request_is_closed_after_those_that_had_none(served: Running) -> None:
    with guarded(served, most=2) as (connections, port), connect(port, HALF_A_HEAD + REST) as known:
        assert known.recv(15) == b"HTTP/1.1 200 OK"
        (kept,) = connections.protocols
        with connect(port) as silent:
            wait_until(lambda: len(connections.protocols) == 2)
            assert ask(port).status_code == 200
            assert is_closed(silent) and kept in connections.protocols
            wait_until(lambda: [*connections.protocols] == [kept])  # the server has seen that `ask` is gone
            with connect(port), connect(port, HALF_A_HEAD), connect(port):
                wait_until(lambda: len(connections.protocols) == 2)
                assert kept in connections.protocols


def test_a_head_has_a_deadline(served: Running, slow: Slow) -> None:
    """Its first byte, or the connection, starts it; further bytes do not. A request in progress has none."""
    with guarded(served, client_seconds=1) as (connections, port), ExitStack() as clients:
        in_progress = slow(port)
        wait_until(lambda: any(not protocol.is_idle for protocol in [*connections.protocols]))
        for said in (b"", HALF_A_HEAD):
            assert is_closed(clients.enter_context(connect(port, said)))
        again = clients.enter_context(connect(port, HALF_A_HEAD + REST))
        answer = again.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        with pytest.raises(OSError):  # the connection is closed while it drips
            while True:
                again.sendall(b"G")
                again.settimeout(0.01)
                try:
                    if again.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    pass
        assert in_progress().status_code == 200


def test_a_client_that_takes_nothing_is_closed(served: Running) -> None:
    """It asks for a whole answer, which no stream's deadline watches."""
    with guarded(served, send_buffer=4096) as (connections, port), socket.socket() as client:
        connections.take_seconds = 0.1
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        body = json.dumps({"prompt": "a " * 100_000, "return_token_strs": True}).encode()  # more than 1 MB comes back
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: connections.protocols)
        wait_until(lambda: not connections.protocols)


def test_the_command_under_a_low_limit_of_descriptors() -> None:
    """Hundreds of silent connections made it refuse all clients, and log an error thousands of times a second."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        process = start("serve", "port=0", "engine.device=cpu", "engine.num_kv_blocks=64")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
        with ExitStack() as clients:
            for number in range(300):
                clients.enter_context(connect(port, HALF_A_HEAD if number % 2 else b""))
            assert ask(port).status_code == 200
        process.terminate()
        done = finish(process, 60)
        assert done.code == 0 and done.err.count("\n") == 2 and "as many as there may be" in done.err, done.err
    finally:
        process.kill()


def test_a_lack_of_descriptors_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio calls `accept` thousands of times then, and logs an error each time."""
    handled: list[dict[str, object]] = []

    def lacking(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    class Loop:
        def default_exception_handler(self, context: dict[str, object]) -> None:
            handled.append(context)

    monkeypatch.setattr(socket.socket, "accept", lacking)
    connections, raised = Connections(100, 60), list[OSError]()
    with Door(socket.create_server(("127.0.0.1", 0)), connections) as door, caplog.at_level(logging.WARNING):
        for _ in range(2000):
            with pytest.raises(OSError) as error:
                door.accept()
            raised.append(error.value)
    assert [type(one) for one in raised[:2]] == [OSError, BlockingIOError]
    assert len(caplog.records) == 1 and "Too many open files" in caplog.text
    quiet_accept(Loop(), {"message": "socket.accept() out of system resource", "exception": raised[0]})  # type: ignore[arg-type]
    assert not handled
    quiet_accept(Loop(), {"message": "a task failed", "exception": ValueError()})  # type: ignore[arg-type]
    assert len(handled) == 1


def test_the_limit_is_below_that_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(descriptors: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))

    limit(1000)
    assert 1 < most_connections(0) < 1000 - SPARE
    assert most_connections(7) == 7
    for descriptors, wanted in ((1000, 999), (SPARE, 0)):
        limit(descriptors)
        with pytest.raises(ConfigError, match=re.escape(f"{descriptors} file descriptors (ulimit -n) leave room for")):
            most_connections(wanted)
    limit(resource.RLIM_INFINITY)
    assert most_connections(0) > 1000 and most_connections(9) == 9
