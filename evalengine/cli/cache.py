"""The arguments and options of `cache`."""

from __future__ import annotations

import re
from typing import Annotated

from typer import Argument, BadParameter, Option

from evalengine.cli.command import Command
from evalengine.util.command import Namespace

SECONDS = {"h": 3600, "d": 86_400, "w": 7 * 86_400}
BYTES = {"MB": 10**6, "GB": 10**9}


def _limit(text: str) -> tuple[str, int]:
    """(name, seconds or bytes) of `older-than=30d` or `size=2GB`."""
    name, _, value = text.partition("=")
    units = {"older-than": SECONDS, "size": BYTES}.get(name, {})
    match = re.fullmatch(r"(\d{1,9})([a-zA-Z]+)", value)
    if match is None or match[2] not in units:
        raise BadParameter(f"{text}: must be older-than=30d (h, d, w) or size=2GB (MB, GB)")
    return name, int(match[1]) * units[match[2]]


def _words(
    folder: Annotated[str, Argument(metavar="FOLDER", help="the folder that runs name by cache=FOLDER")],
    prune: Annotated[list[str] | None, Option(metavar="LIMIT", parser=_limit, help="older-than=30d, size=2GB, or both, "
                     "one after another")] = None,
) -> Namespace:  # fmt: skip
    """Lists what a cache of answers (cache=FOLDER of a run) holds, by model; --prune makes it smaller."""
    return Namespace(folder=folder, prune=prune or [])


EPILOG = """\
  cache ~/answers                          what it holds
  cache ~/answers --prune older-than=30d   without what was written more than 30 days ago (h, d, w)
  cache ~/answers --prune size=2GB         without the oldest answers beyond that size (MB, GB)

Exit codes: 0 done, 1 the cache cannot be read or written, 2 bad usage."""
main = Command("cache", _words, "evalengine.cache.cli:main", EPILOG)
