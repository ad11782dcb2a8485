"""Rows from the Hugging Face Hub, at a pinned revision, with an answer within seconds when there is no network."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evalengine.config import DatasetConfig
from evalengine.errors import ConfigError

PROBE_SECONDS = 5.0


class HubUnavailable(Exception):
    """The Hub cannot be asked and its local cache does not hold the rows."""


def load_from_hub(config: DatasetConfig, split: str) -> list[dict[str, Any]]:
    """The rows of `split`, from the Hub or, without a network, from its local cache.

    Raises HubUnavailable; ConfigError if the Hub has no such dataset, configuration, revision or split, or if the cache
    holds another revision than the pinned one.
    """
    import datasets

    if not config.path:
        raise ConfigError("task.dataset.path is not set")
    with _offline_if_unreachable() as offline:
        try:
            rows = datasets.load_dataset(config.path, config.name, split=split, revision=config.revision)
        except (OSError, ConnectionError) as error:
            if offline or not isinstance(error, FileNotFoundError):
                raise HubUnavailable(offline or str(error)) from error
            raise ConfigError(f"task.dataset.path={config.path}: {error}") from error
        except ValueError as error:  # an unknown configuration or split: the message lists the known ones
            raise ConfigError(f"task.dataset {config.path}: {error}") from error
    cached = Path(rows.cache_files[0]["filename"]).parent.name if rows.cache_files else None
    if offline and config.revision and cached != config.revision:  # `datasets` takes any cached revision when offline
        raise HubUnavailable(f"{offline}, and the cache holds revision {cached} instead of {config.revision}")
    return list(rows)


@contextmanager
def _offline_if_unreachable() -> Iterator[str]:
    """Yields why the Hub cannot be reached ("" if it can) and keeps both libraries offline meanwhile.

    Without this, huggingface_hub retries each request: 24 s to a first failure, measured with huggingface_hub 2.4.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    reason = _unreachable(constants.ENDPOINT)
    if not reason:
        yield ""
        return
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False


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
