"""`python -m evalengine serve`: loads the model, listens, and ends once the answers that run are finished."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from evalengine.errors import ConfigError
from evalengine.integrations.openai_server.settings import LOOPBACK, ServeSettings, read_words
from evalengine.plain_text import say, warn
from evalengine.util.command import Namespace
from evalengine.util.endings import SIGNALS, hear
from evalengine.util.plugins import not_installed

BACKLOG = 2048  # connections that the system holds for us while we are busy


def main(arguments: Namespace) -> int:
    """Runs `serve` with its words; returns the exit code once it is stopped.

    Raises: ConfigError for bad settings and where the extra is not installed, before anything is loaded.
    """
    if missing := not_installed("serve", "fastapi", "uvicorn", "prometheus_client"):
        raise ConfigError(f"serve: {missing}")
    settings, words = read_words(arguments.words)
    if arguments.api_key is not None and (not arguments.api_key.strip() or not arguments.api_key.isascii()):
        raise ConfigError("serve: --api-key: must be ASCII characters, and not empty")
    from evalengine.config.compose import compose_jobs
    from evalengine.integrations.openai_server.connections import most_connections

    most_connections(settings.max_connections)
    config = compose_jobs(words)[0].config
    with _listening(settings) as bound:
        _serve(config, settings, arguments.api_key, bound)
    return 0


def _serve(config: Any, settings: ServeSettings, api_key: str | None, bound: socket.socket) -> None:
    from evalengine.engine.llm import LLM
    from evalengine.engine.thread import EngineThread
    from evalengine.integrations.openai_server.app import Server
    from evalengine.integrations.openai_server.model import ServedModel

    if settings.host not in LOOPBACK and api_key is None:
        warn(f"host={settings.host}: anyone can send requests; EVALENGINE_API_KEY=... requires a key")
    mode = {"batch_invariant": config.batch_invariant, "numerics": config.numerics, "engine": config.engine}
    with LLM(config.model, **mode, load=False) as llm:
        llm.load()
        llm.capture_graphs()  # now, before the first request
        model = ServedModel(config, llm)
        engine = EngineThread(llm)
        recorder = _recorder(settings, config, llm)
        engine.start()
        try:
            if llm.settings.numerics == "fast":
                warn("numerics=fast: bits depend on the other requests; batch_invariant=true has equal bytes")
            where = f"[{settings.host}]" if ":" in settings.host else settings.host
            line = (
                f"{model.name} at http://{where}:{bound.getsockname()[1]}/v1, {model.fingerprint}, "
                f"{llm.settings.numerics} on {llm.settings.device}"
            )
            _listen(Server(model, engine, settings, api_key, recorder).app, bound, settings, partial(say, line))
        finally:
            engine.stop(halt=True)
            if recorder is not None and (digest := recorder.run.finish()) is not None:
                say(recorder.run.folder.path)
                say(f"digest: {digest}")


def _recorder(settings: ServeSettings, config: Any, llm: Any) -> Any:
    """The recorder of the answers; None without `--record`."""
    if not settings.record:
        return None
    from evalengine.integrations.openai_server.recorder import Recorder, ServedRun

    return Recorder(ServedRun.open(settings.record, f"serve-{config.model.name}", config, llm))


@contextmanager
def _listening(settings: ServeSettings) -> Iterator[socket.socket]:
    """A socket that listens there, before seconds are spent on loading. Raises ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        bound = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"serve: host={settings.host} port={settings.port}: {why}; name another port (0: any), or "
                          "another of this machine's addresses") from error  # fmt: skip
    with bound:
        yield bound


def _listen(app: Any, bound: socket.socket, settings: ServeSettings, ready: Any) -> None:
    """Serves until a signal comes, and finishes the requests received by then."""
    import asyncio

    import uvicorn

    from evalengine.integrations.openai_server.connections import (
        Connections,
        Door,
        most_connections,
        quiet_accept,
        uvicorn_config,
    )

    class _Server(uvicorn.Server):
        """uvicorn's, without its messages, which raises no signal again: this is a normal end."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self._take) for number in SIGNALS}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def _take(self, number: int, frame: Any) -> None:
            hear()
            if self.should_exit:
                self.force_exit = True
            else:
                warn("ending once the answers that run are finished; Ctrl-C again ends at once")
                self.should_exit = True

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().set_exception_handler(quiet_accept)
            await super().startup(sockets)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            patience = asyncio.ensure_future(self._lose_patience())
            await super().shutdown(sockets)
            patience.cancel()

        async def _lose_patience(self) -> None:
            """Once all is answered, a client that takes nothing of its answer keeps no server from ending."""
            while self.server_state.tasks:
                await asyncio.sleep(0.1)
            await asyncio.sleep(settings.client_seconds)
            self.force_exit = True

    connections = Connections(most_connections(settings.max_connections), settings.client_seconds)
    with Door(bound, connections) as door:
        _Server(uvicorn_config(app, connections)).run(sockets=[door])
