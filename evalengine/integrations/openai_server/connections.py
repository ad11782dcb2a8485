"""Bounds a server's connections: however many say nothing, other clients are served.

A connection that says nothing costs a file descriptor. When the process has no more of them, asyncio accepts no one,
and logs thousands of errors a second. So there are fewer connections than descriptors: beyond the limit the one that
has been silent for longest is closed, and where every one has a request in progress the new one is answered 503. A
request's head has a deadline, too, and so has a client that takes nothing of its answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from evalengine.errors import ConfigError
from evalengine.integrations.openai_server.answering import as_json
from evalengine.integrations.openai_server.errors import ApiError

logger = logging.getLogger(__name__)
# That a connection may stay open without a request: longer than clients keep theirs (httpx 5 s, aiohttp 15), for one
# that the server closes as its client sends the next request looks like a lost answer.
IDLE_SECONDS = 75
SPARE = 64  # descriptors for everything else that the server opens
MOST = 1 << 16  # connections, where the system would allow more
SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WARN_SECONDS = 60.0  # between two warnings
TAKE_SECONDS = 5.0  # beyond `client_seconds`, at which a stream is ended


def most_connections(wanted: int) -> int:
    """How many connections the process may have; wanted: `max_connections`, 0 for as many as there can be.

    Raises: ConfigError if there are too few file descriptors.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return wanted or MOST
    room = descriptors - len(os.listdir("/dev/fd")) - SPARE
    if room < max(1, wanted):
        raise ConfigError(
            f"serve: max_connections={wanted}: {descriptors} file descriptors (ulimit -n) leave room for "
            f"{max(0, room)} connections; raise the limit" + (", or lower max_connections" if room > 0 else "")
        )
    return wanted or min(room, MOST)


class Connections:
    """The connections of one server. Used in the event loop alone."""

    def __init__(self, most: int, client_seconds: float) -> None:
        """client_seconds: to send a request's head; a client that takes nothing has `TAKE_SECONDS` more."""
        self.most, self.head_seconds, self.take_seconds = most, client_seconds, client_seconds + TAKE_SECONDS
        self.descriptors: set[int] = set()  # of accepted connections that are not closed yet
        self.protocols: dict[GuardedProtocol, None] = {}  # of those that have one already, the oldest first
        self._warned = -WARN_SECONDS

    def close_silent(self) -> bool:
        """Close the oldest connection that has never had a request, or else the oldest one without a request now, or
        else one that is being closed, whose client does not take the end of its answer.

        Returns whether there was one: its descriptor is free after the loop's next turn.
        """
        closing = [protocol for protocol in self.protocols if protocol.transport.is_closing()]
        idle = [protocol for protocol in self.protocols if protocol.is_idle and protocol not in closing]
        silent = [protocol for protocol in idle if protocol.cycle is None]
        chosen = [*silent, *idle, *closing][:1]
        for protocol in chosen:
            protocol.transport.abort()
        return bool(chosen)

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, unless there was one a short time ago."""
        if time.monotonic() - self._warned >= WARN_SECONDS:
            self._warned = time.monotonic()
            logger.warning(text, *args)


class Door(socket.socket):
    """A listening socket that accepts as many connections as there may be."""

    def __init__(self, bound: socket.socket, connections: Connections) -> None:
        """bound: a socket that listens; this one takes its place."""
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._connections = connections
        self._short_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """A new connection. Raises BlockingIOError, at which asyncio waits for the loop's next turn, if none comes or
        there is no room yet, and OSError at most once a second if the process lacks descriptors."""
        ours = self._connections
        if len(ours.descriptors) >= ours.most:
            ours.warn("%d connections, as many as there may be (ulimit -n, max_connections): closing silent ones",
                      ours.most)  # fmt: skip
            is_pending = len(ours.descriptors) > len(ours.protocols)  # accepted in this turn of the loop
            if not is_pending and not ours.close_silent():
                _turn_away(super().accept()[0])
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno not in SHORTAGE:
                raise
            if time.monotonic() < self._short_until:  # asyncio tries again and again before it waits for a second
                raise BlockingIOError from error
            self._short_until = time.monotonic() + 0.5
            ours.warn("no connection can be accepted (%s): closing silent ones; raise ulimit -n", error.strerror)
            ours.close_silent()
            raise
        ours.descriptors.add(accepted.fileno())
        return accepted, address


def _turn_away(accepted: socket.socket) -> None:
    """Answer 503 to a connection for which there is no room."""
    body = as_json(ApiError(503, "too many connections have a request in progress; come back later").body)
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    with accepted, suppress(OSError):
        accepted.setblocking(False)
        with suppress(BlockingIOError):
            accepted.recv(1 << 16)  # a request that was not read would have the system drop the answer
        accepted.send(f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + body)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol of a connection, with deadlines for a request's head and for taking its answer."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._ours, self._descriptor = connections, -1
        self._head: asyncio.TimerHandle | None = None  # closes the connection if no head comes
        self._stalled: asyncio.TimerHandle | None = None  # closes it if the client takes nothing

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress, whose head has come."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self.transport, self._descriptor = transport, transport.get_extra_info("socket").fileno()
        self._ours.protocols[self] = None
        super().connection_made(transport)
        self._head = self.loop.call_later(self._ours.head_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._cancel_head()
        elif self._head is None:  # the first bytes of a further request's head
            self._head = self.loop.call_later(self._ours.head_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._ours.take_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stalled()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_head()
        self._cancel_stalled()
        self._ours.protocols.pop(self, None)
        self._ours.descriptors.discard(self._descriptor)

    def _cancel_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _cancel_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def uvicorn_config(app: Any, connections: Connections) -> uvicorn.Config:
    """uvicorn's settings. `Door` and `GuardedProtocol` need asyncio's loop and the h11 protocol."""
    protocol: Any = partial(GuardedProtocol, connections)
    return uvicorn.Config(app, http=protocol, loop="asyncio", log_config=None, access_log=False, lifespan="off",
                          timeout_keep_alive=IDLE_SECONDS, server_header=False, date_header=False)  # fmt: skip


def quiet_accept(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler, without the shortage of descriptors, of which `Door` warns."""
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in SHORTAGE and "accept" in context.get("message", "")):
        loop.default_exception_handler(context)
