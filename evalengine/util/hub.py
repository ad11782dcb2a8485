"""Whether the Hugging Face Hub can be reached, found out by one request instead of its client's many; and what a
command waits for, where that may take long."""

from __future__ import annotations

import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException

from evalengine.plain_text import printable

SILENCE = 2.0  # seconds, after which a command says what it waits for
PROBE_SECONDS = 5
REMEMBERED_SECONDS = 60  # a run needs its model and for each of its splits
_known: dict[str, tuple[float, str]] = {}  # endpoint -> (when it was checked, `_unreachable`)


@contextmanager
def offline_if_unreachable() -> Iterator[str]:
    """Yields why the Hub cannot be reached ("" if it can), and meanwhile keeps its client offline; `datasets`, too, if
    that library is loaded.

    Without this, huggingface_hub retries each request: 24 s to a first failure, measured with huggingface_hub 2.4.
    """
    from huggingface_hub import constants

    libraries = [constants, *([sys.modules["datasets"].config] if "datasets" in sys.modules else [])]
    if any(library.HF_HUB_OFFLINE for library in libraries):
        yield "HF_HUB_OFFLINE is set"
        return
    reason = _unreachable(constants.ENDPOINT)
    for library in libraries:
        library.HF_HUB_OFFLINE = bool(reason)
    try:
        yield reason
    finally:
        for library in libraries:
            library.HF_HUB_OFFLINE = False


def _unreachable(endpoint: str) -> str:
    """Why `endpoint` gives no answer within `PROBE_SECONDS`; "" if it gives any. A thread tries, since looking up a
    name takes half a minute where no name server answers, and has no separate limit."""
    checked, reason = _known.get(endpoint, (-float("inf"), ""))
    if time.monotonic() - checked < REMEMBERED_SECONDS:
        return reason
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.append(_ask(endpoint)), name="evalengine probe", daemon=True)
    asking.start()
    with said_if_long(f"waiting for {endpoint}; HF_HUB_OFFLINE=1 takes its local cache at once"):
        asking.join(PROBE_SECONDS)
    reason = said[0] if said else f"{endpoint} cannot be reached (no answer in {PROBE_SECONDS} s)"
    _known[endpoint] = time.monotonic(), reason
    return reason


def _ask(endpoint: str) -> str:
    """Why one request to `endpoint` gets no answer (through the environment's proxies); "" if it gets any answer."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError, HTTPException) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLError):  # an answer all the same; the Hub's client has its own certificates
            return ""
        return f"{endpoint} cannot be reached ({cause})"
    return ""


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Prints `what` to standard error if the block takes more than `SILENCE` seconds."""
    stream = sys.stderr  # as it is now: the block may redirect it

    def say() -> None:
        stream.write(printable(f"evalengine: {what}") + "\n")
        stream.flush()

    timer = threading.Timer(SILENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
