"""A server on a free port of this machine, in this process: real sockets, no signals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from evalengine import LLM
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.engine.thread import EngineThread
from evalengine.integrations.openai_server.app import Server
from evalengine.integrations.openai_server.connections import MOST, Connections, Door, uvicorn_config
from evalengine.integrations.openai_server.model import ServedModel
from evalengine.integrations.openai_server.settings import ServeSettings

QUESTION = "Question: Arlo collects 45 flowers. Diego has 32 fewer. How many do they have together?\nAnswer:"
SMALL = ("engine.device=cpu", "engine.num_kv_blocks=64", "engine.block_size=64")


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`."""

    url: str
    server: Server
    llm: LLM

    config: Config
    client: httpx.Client  # making one takes 30 ms

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def completion(self, **body: Any) -> dict[str, Any]:
        """The answer to a completion, which must succeed."""
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def chat(self, content: str, **body: Any) -> dict[str, Any]:
        """The answer to a chat of one message, which must succeed."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body})
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value


@contextmanager
def running(
    *words: str, settings: ServeSettings | None = None, api_key: str | None = None, send_buffer: int | None = None
) -> Iterator[Running]:
    """A server of the bundled model, with further settings as on a command line."""
    config = compose_jobs([*SMALL, *words])[0].config
    engine = LLM(config.model, batch_invariant=config.batch_invariant, engine=config.engine)
    thread = EngineThread(engine)
    thread.start()
    try:
        server = Server(ServedModel(config, engine), thread, settings or ServeSettings(), api_key)
        with serving(server.app, send_buffer) as url, httpx.Client(base_url=url, timeout=120) as client:
            yield Running(url, server, engine, config, client)
    finally:
        thread.stop(halt=True)
        engine.close()


@contextmanager
def serving(app: Any, send_buffer: int | None = None, connections: Connections | None = None) -> Iterator[str]:
    """The address of an ASGI application that listens on a free port, in a thread. send_buffer: bytes that the system
    holds for a client that takes none (default: megabytes)."""
    connections = connections or Connections(MOST, client_seconds=60)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        if send_buffer is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = bound.getsockname()[1]
        server = uvicorn.Server(uvicorn_config(app, connections))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [Door(bound, connections)]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server has ended"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30)


def wait_until(condition: Any, seconds: float = 30) -> None:
    """Waits until the condition holds; fails if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)
