"""Rows from the Hugging Face Hub, at a pinned revision, with an answer within seconds when there is no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from evalengine.config.schema import DatasetConfig
from evalengine.errors import ConfigError
from evalengine.util.hub import offline_if_unreachable


class HubUnavailable(Exception):
    """The Hub cannot be asked and its local cache does not hold the rows."""


def load_from_hub(config: DatasetConfig, split: str) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of `split` and the commit that they belong to, from the Hub or, without a network, from its local cache.

    Raises HubUnavailable, also if only another commit than the pinned one can be had; ConfigError if the Hub has no
    such dataset, configuration, revision or split.
    """
    import datasets

    if not config.path:
        raise ConfigError("dataset.path is not set")
    with offline_if_unreachable() as offline:
        try:
            rows = datasets.load_dataset(config.path, config.name, split=split, revision=config.revision)
        except ValueError as error:  # the configuration or split is unknown; the message lists the known ones
            raise ConfigError(f"task.dataset.path={config.path}: {error}") from error
        except Exception as error:  # transport errors share no class: the Hub's client uses httpx or httpx2, by version
            if isinstance(error, FileNotFoundError) and not offline:
                raise ConfigError(f"task.dataset.path={config.path}: {error}") from error
            raise HubUnavailable(offline or f"{type(error).__name__}: {error.__cause__ or error}") from error
    commit = Path(rows.cache_files[0]["filename"]).parent.name if rows.cache_files else None
    # `datasets` takes any cached commit when the Hub fails to answer; its cache folder is named after the commit.
    if re.fullmatch(r"[0-9a-f]{40}", config.revision or "") and commit != config.revision:
        mismatch = f"the cache holds revision {commit} instead of {config.revision}"
        raise HubUnavailable(f"{offline}, and {mismatch}" if offline else mismatch)
    return list(rows), commit
