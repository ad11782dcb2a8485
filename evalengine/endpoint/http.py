"""Asks an endpoint: one body after another from several threads, with retries; what came back, as it came."""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any

from evalengine.config.check import API_KEYS
from evalengine.config.schema import EndpointConfig
from evalengine.errors import EvalEngineError, one_line
from evalengine.util.plain_files import parse_json

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses after which the same request may succeed
FOR_ALL = (301, 302, 303, 307, 308, 401, 403, 404)  # statuses that every other request would have, too
LONGEST_WAIT = 60.0  # seconds between two attempts
LONGEST_ASKED_WAIT = 600.0  # seconds of a Retry-After that are kept
HIDDEN = "(the key)"  # what stands where an endpoint repeats the key
SHORTEST_SECRET = 12  # characters of a key that is taken out of what an endpoint says; local servers' "EMPTY" is none
MAX_BYTES = 1 << 26  # of an answer


@dataclass(frozen=True)
class Reply:
    """What came of one request: its JSON, or why there is none."""

    number: int  # the request's place among those asked
    value: Mapping[str, Any] | None
    attempts: int
    seconds: float
    error: str = ""
    for_all: bool = False  # whether the error is no single request's


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the key to wherever a redirect leads, and make a GET of the request."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Client:
    """Threads that ask one path. `ask` yields replies in the order in which they come."""

    def __init__(self, url: str, settings: EndpointConfig) -> None:
        self._url, self._settings = url, settings
        self._key = next((os.environ[name].strip() for name in API_KEYS if os.environ.get(name, "").strip()), None)
        self._secret = self._key if self._key is not None and len(self._key) >= SHORTEST_SECRET else None
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._stop = threading.Event()

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> Iterator[Reply]:
        """A reply for each body. Leaving the iterator early asks nothing more.

        Raises: EvalEngineError for an error that every request would have (a wrong key, path or model).
        """
        waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        replies: queue.SimpleQueue[Reply | Exception] = queue.SimpleQueue()
        for number in range(len(bodies)):
            waiting.put(number)
        threads = min(self._settings.concurrency, len(bodies))
        for _ in range(threads):
            waiting.put(None)

        def work() -> None:
            while not self._stop.is_set() and (number := waiting.get()) is not None:
                try:
                    replies.put(self._reply(number, bodies[number]))
                except Exception as error:  # else whoever waits for this reply waits for ever
                    replies.put(error)

        for _ in range(threads):  # daemons: an answer that takes a minute must not hold back Ctrl-C
            threading.Thread(target=work, name="endpoint", daemon=True).start()
        try:
            for _ in bodies:
                reply = replies.get()
                if isinstance(reply, Exception):
                    raise reply
                if reply.for_all:
                    raise EvalEngineError(f"model.api={self._url}: {reply.error}; see {' and '.join(API_KEYS)}, "
                                          "model.name and the address")  # fmt: skip
                yield reply
        finally:
            self._stop.set()

    def _reply(self, number: int, body: Mapping[str, Any]) -> Reply:
        begin, why = time.perf_counter(), ""
        for attempt in range(1, self._settings.retries + 2):
            wait = min(LONGEST_WAIT, 0.5 * 2**attempt)
            try:
                value = self._post(body)
                return Reply(number, value, attempt, time.perf_counter() - begin)
            except urllib.error.HTTPError as error:
                why = self._without_key(f"status {error.code}: {_said(error)}")
                if error.code not in AGAIN:
                    return Reply(number, None, attempt, time.perf_counter() - begin, why, error.code in FOR_ALL)
                wait = _wanted_wait(error, wait)
            except (OSError, ValueError, HTTPException) as error:  # the last: a status line or chunks that are none
                why = self._without_key(one_line(error))
            if attempt <= self._settings.retries and self._stop.wait(wait):
                break
        return Reply(number, None, self._settings.retries + 1, time.perf_counter() - begin, why)

    def _post(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        headers = {"content-type": "application/json", "user-agent": "evalengine"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        with self._opener.open(request, timeout=self._settings.timeout) as answer:
            content: bytes = answer.read(MAX_BYTES)
        if self._secret is not None:
            content = content.replace(self._secret.encode(), HIDDEN.encode())
        value = parse_json(content)
        if not isinstance(value, dict) or not isinstance(value.get("choices"), list) or not value["choices"]:
            raise ValueError("its answer has no choices")
        _check_text(value["choices"][0])
        return value

    def _without_key(self, text: str) -> str:
        return text if self._secret is None else text.replace(self._secret, HIDDEN)


def _check_text(choice: Any) -> None:
    """Raises ValueError for a choice without a text, which would be scored as an empty answer; null is one (of a model
    that only thought, or called a tool)."""
    message = choice.get("message") if isinstance(choice, dict) else None
    place, name = (message, "content") if isinstance(message, dict) else (choice, "text")
    if not isinstance(place, dict) or not isinstance(place.get(name, 0 if name == "text" else None), str | None):
        raise ValueError(f"its first choice has no text ({name} must be a string)")


def _said(error: urllib.error.HTTPError) -> str:
    """What the endpoint said about its error, in a line."""
    try:
        value = parse_json(error.read(10_000))
        said = value["error"]["message"] if isinstance(value, dict) and isinstance(value.get("error"), dict) else value
    except (OSError, ValueError, KeyError, HTTPException):
        said = error.reason
    return " ".join(str(said).split())[:300]


def _wanted_wait(error: urllib.error.HTTPError, otherwise: float) -> float:
    """The seconds that the endpoint asks to wait, by their number or by a date (RFC 9110, 10.2.3)."""
    asked = error.headers.get("retry-after", "")
    try:
        seconds = float(asked) if not asked[:1].isalpha() else parsedate_to_datetime(asked).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return otherwise
    return min(LONGEST_ASKED_WAIT, max(0.0, seconds)) if math.isfinite(seconds) else otherwise
