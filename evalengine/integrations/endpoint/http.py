"""Sends requests to an endpoint from several threads, with retries; returns what came back, with strings that are safe
to store and print (`Cleaner`): no API key, no lone surrogates."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import queue
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from evalengine.config.check import API_KEYS, HTTP, MODELS
from evalengine.config.schema import EndpointConfig
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.util.plain_files import parse_json
from evalengine.util.plugins import added

HIDDEN = "(the key)"  # replaces the API key
PLACEHOLDERS = ("empty", "none", "null", "dummy", "unused", "no-key", "not-needed")  # keys that are no secret
WHOLE_WORD = 5  # characters; a shorter key is replaced only as a whole word, since it is part of many words
LONGEST_LINE = 300  # characters of an error text
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses after which the same request may succeed
# Statuses that every other request would have, too. 403 is none: content filters use it for one request.
FOR_ALL = (301, 302, 303, 307, 308, 401, 402, 404, 405, 407)
FILTERED = ("content_filter", "content_policy_violation")  # error codes that a content filter uses instead of a status
LONGEST_WAIT = 60.0  # seconds between two attempts
LONGEST_RETRY_AFTER = 600.0  # the longest Retry-After that is honoured, seconds
MAX_BYTES = 1 << 26  # of an answer
MAX_ERROR_BYTES = 1 << 20
# (the address, a request's JSON, seconds) -> the response's JSON. After an OSError or ValueError it is sent again.
Send = Callable[[str, bytes, float], bytes]


@dataclass
class Cleaned:
    """A JSON value whose strings are clean, and what that took."""

    value: Any = None
    surrogates: int = 0  # lone surrogates that became U+FFFD
    keys: int = 0  # occurrences of the API key that became `HIDDEN`


class Cleaner:
    """Cleans strings, mappings' keys included.

    A lone surrogate (half of a character, as from an emoji cut in two) cannot be encoded as UTF-8 and becomes U+FFFD;
    two halves in a row become their character. The API key becomes `HIDDEN`, however its characters are escaped
    (backslashes, \\u00xx, %xx).
    """

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None or key.lower() in PLACEHOLDERS else _pattern(key)

    def clean(self, value: Any) -> Cleaned:
        """A copy of a JSON value. Clean it after parsing: JSON escapes hide keys and surrogates."""
        result = Cleaned()
        result.value = self._value(value, result)
        return result

    def line(self, text: str) -> str:
        """The text in one line of at most `LONGEST_LINE` characters; truncated last, since half a key would remain."""
        return str(self.clean(" ".join(text.split())).value)[:LONGEST_LINE]

    def _value(self, value: Any, counts: Cleaned) -> Any:
        if isinstance(value, str):
            return self._text(value, counts)
        if isinstance(value, list):
            return [self._value(item, counts) for item in value]
        if isinstance(value, dict):
            return {self._text(name, counts): self._value(item, counts) for name, item in value.items()}
        return value

    def _text(self, text: str, counts: Cleaned) -> str:
        if not text.isascii():
            before = text.count("\ufffd")
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            counts.surrogates += text.count("\ufffd") - before
        if self._key is not None:
            text, found = self._key.subn(HIDDEN, text)
            counts.keys += found
        return text


def _pattern(key: str) -> re.Pattern[str]:
    """Matches an ASCII key, whichever of its characters are escaped."""
    spellings = "".join(
        rf"(?:\\{{0,8}}{re.escape(char)}|(?i:\\{{1,8}}u00{ord(char):02x}|%{ord(char):02x}))" for char in key
    )
    return re.compile(spellings if len(key) >= WHOLE_WORD else rf"(?<![A-Za-z0-9]){spellings}(?![A-Za-z0-9])")


@dataclass(frozen=True)
class Reply:
    """The outcome of one request: its JSON with clean strings (`Cleaner`), or why there is none."""

    number: int  # the request's place among those sent
    value: Mapping[str, Any] | None
    attempts: int
    seconds: float
    error: str = ""
    for_all: bool = False  # whether the error is no single request's
    rejected: bool = False  # whether the endpoint rejects this request, so that asking again is of no use
    surrogates: int = 0  # as in `Cleaned`
    keys: int = 0


class _Failed(Exception):
    """The endpoint reported an error. status: 0 where an error object names none."""

    def __init__(self, status: int, why: str, response: urllib.error.HTTPError | None = None) -> None:
        super().__init__(why)
        self.status, self.response = status, response


class _Timed(io.RawIOBase):
    """Reads from a socket until a deadline. A socket's timeout only limits each read: an endpoint that occasionally
    sends a byte would never meet it."""

    def __init__(self, source: socket.socket, deadline: float) -> None:
        """deadline: in the seconds of `time.monotonic`."""
        self._socket, self._raw, self._deadline = source, source.makefile("rb", buffering=0), deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, deadline))


def _connected(address: tuple[str, int], *_: Any, deadline: float) -> socket.socket:
    """As `socket.create_connection`, but the timeout limits all of the host's addresses together: each may take its
    share of the time that is left."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for untried, (family, kind, protocol, _name, place) in zip(range(len(found), 0, -1), found, strict=True):
        try:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(max(0.001, deadline - time.monotonic()) / untried)
                connection.connect(place)
                connection.settimeout(max(0.001, deadline - time.monotonic()))  # for TLS to begin
                return connection
            except OSError:
                connection.close()
                raise
        except OSError:
            if untried == 1:
                raise
    raise OSError(f"{address[0]} has no address")


class _Deadline(http.client.HTTPConnection):
    """A connection whose timeout limits everything from connecting to the last byte of the response, except the
    resolver's time to find an address."""

    def __init__(self, host: str, /, *, timeout: float = 0.0, **options: Any) -> None:
        super().__init__(host, timeout=timeout, **options)
        self._deadline = time.monotonic() + timeout
        self.response_class = partial(_Response, deadline=self._deadline)  # type: ignore[assignment]
        self._create_connection = partial(_connected, deadline=self._deadline)

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(max(0.001, self._deadline - time.monotonic()))  # for sending, as a whole


class _TLSDeadline(_Deadline, http.client.HTTPSConnection):
    """As `_Deadline`."""


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(_Deadline, request)


class _TLSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: Any) -> Any:
        return self.do_open(_TLSDeadline, request)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the key to wherever a redirect leads, and make a GET of the request."""

    def redirect_request(self, *_: Any) -> None:
        return None


def api_key() -> str | None:
    """The key that requests carry. Raises ConfigError for one that no HTTP header can carry."""
    name = next((name for name in API_KEYS if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    key = os.environ[name].strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"{name}: contains characters that are not printable ASCII, such as a line break; copy it again"
        )
    return key


class Client:
    """Threads that send requests to one path. `ask` yields replies in the order in which they come."""

    def __init__(self, url: str, settings: EndpointConfig) -> None:
        self._url, self._settings, self._key = url, settings, api_key()
        self.cleaner = Cleaner(self._key)
        self._opener = urllib.request.build_opener(_NoRedirects, _Handler, _TLSHandler)
        scheme = urlsplit(url).scheme
        try:
            self._send: Send = self._over_http if scheme in HTTP else added(MODELS)[scheme].load()
        except Exception as error:  # a third-party package may raise anything
            raise ConfigError(f"model.api={url}: its package cannot be imported ({error})") from error
        self._stop = threading.Event()

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> Iterator[Reply]:
        """A reply for each body. Leaving the iterator early sends nothing more.

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
                except Exception as error:  # raised where the reply is awaited
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
                got = self._post(body)
                seconds = time.perf_counter() - begin
                return Reply(number, got.value, attempt, seconds, surrogates=got.surrogates, keys=got.keys)
            except _Failed as error:
                why = str(error)
                if error.status and error.status not in AGAIN:
                    for_all, rejected = error.status in FOR_ALL, 400 <= error.status < 500
                    seconds = time.perf_counter() - begin
                    return Reply(number, None, attempt, seconds, why, for_all, rejected and not for_all)
                wait = wait if error.response is None else _wanted_wait(error.response, wait)
            except (OSError, ValueError, http.client.HTTPException) as error:  # the last: malformed HTTP
                why = self.cleaner.line(f"{type(error).__name__}: {error}")
                # While connecting or sending, urllib puts it into a URLError.
                if isinstance(getattr(error, "reason", error), TimeoutError):
                    why = f"no complete answer within endpoint.timeout={self._settings.timeout} seconds"
            if attempt <= self._settings.retries and self._stop.wait(wait):
                break
        return Reply(number, None, self._settings.retries + 1, time.perf_counter() - begin, why)

    def _over_http(self, url: str, body: bytes, timeout: float) -> bytes:
        headers = {"content-type": "application/json", "user-agent": "evalengine"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                content: bytes = answer.read(MAX_BYTES)
                return content
        except urllib.error.HTTPError as error:
            why = self.cleaner.line(f"status {error.code}: {_body_message(error)}")
            raise _Failed(error.code, why, error) from error

    def _post(self, body: Mapping[str, Any]) -> Cleaned:
        content = self._send(self._url, json.dumps(body).encode(), self._settings.timeout)
        got = self.cleaner.clean(parse_json(content))
        if (failed := _error_object(got.value)) is not None:
            status, message = failed
            named = f" (code {status})" if status else ""
            raise _Failed(status, self.cleaner.line(f"status 200 with an error{named}: {message}"))
        choices = got.value.get("choices") if isinstance(got.value, dict) else None
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"its answer has no choices: {_message(got.value)}")
        _check_text(choices[0])
        return got


def _error_object(value: Any) -> tuple[int, str] | None:
    """(the status that its code stands for or 0, the message) of an answer that reports an error despite its status
    200, of the whole or of its first choice."""
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    place = next((one for one in (value, first) if one.get("error")), value if value.get("object") == "error" else None)
    if place is None:
        return None
    error = place.get("error")
    code = str(error.get("code") if isinstance(error, dict) else place.get("code"))
    if code in FILTERED:
        return 400, _message(place)
    return int(code) if re.fullmatch("[45][0-9][0-9]", code) else 0, _message(place)


def _message(value: Any) -> str:
    """The message of an error's JSON, with its code, as interfaces of OpenAI's kind write it; else all of the JSON."""
    error = value.get("error") or value if isinstance(value, dict) else value
    if not isinstance(error, dict):
        return error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
    message, code = error.get("message"), error.get("code")
    if not isinstance(message, str):
        return json.dumps(error, ensure_ascii=False)
    return f"{message} ({code})" if isinstance(code, str) and code and code not in message else message


def _check_text(choice: Any) -> None:
    """Raises ValueError for a choice without a text, which would be scored as an empty answer; null is one (of a model
    that only thought, or called a tool)."""
    message = choice.get("message") if isinstance(choice, dict) else None
    place, name = (message, "content") if isinstance(message, dict) else (choice, "text")
    if not isinstance(place, dict) or not isinstance(place.get(name, 0 if name == "text" else None), str | None):
        raise ValueError(f"its first choice has no text ({name} must be a string)")


def _body_message(error: urllib.error.HTTPError) -> str:
    """The message in an error's body, or its reason phrase if the body does not come in time or cannot be read."""
    try:
        return _message(parse_json(error.read(MAX_ERROR_BYTES)))
    except (OSError, ValueError, http.client.HTTPException):
        return str(error.reason)


def _wanted_wait(error: urllib.error.HTTPError, otherwise: float) -> float:
    """The seconds that the endpoint wants the client to wait, by their number or by a date (RFC 9110, 10.2.3)."""
    delay = error.headers.get("retry-after", "")
    try:
        seconds = float(delay) if not delay[:1].isalpha() else parsedate_to_datetime(delay).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return otherwise
    return min(LONGEST_RETRY_AFTER, max(0.0, seconds)) if math.isfinite(seconds) else otherwise
