"""Whether the Hugging Face Hub can be reached, found out by one request instead of its client's many."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

PROBE_SECONDS = 5


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
    """Why one request to `endpoint` gets no answer (through the environment's proxies); "" if it gets any answer."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (urllib.error.URLError, TimeoutError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLError):  # an answer all the same; the Hub's client has its own certificates
            return ""
        return f"{endpoint} cannot be reached ({cause})"
    return ""
