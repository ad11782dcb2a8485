"""`python -m evalengine cache FOLDER`: what a cache of answers holds, and making it smaller."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from evalengine.cache.store import Store, advice
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import say
from evalengine.util.command import Namespace
from evalengine.util.sheet import Sheet
from evalengine.util.tables import print_sheet


def main(arguments: Namespace) -> int:
    """Runs `cache` with its arguments; returns the exit code."""
    limits = dict(arguments.prune)
    with Store.open(arguments.folder, create=False) as store:
        if limits and store.read_only:
            raise ConfigError(f"cache: {arguments.folder} cannot be written, so nothing can be pruned")
        try:
            if limits:
                before = int(time.time()) - limits["older-than"] if "older-than" in limits else None
                say(f"{store.prune(before, limits.get('size')):,} answers deleted")
            _show(store.models(), store.size())
        except sqlite3.Error as error:
            raise EvalEngineError(f"{store.path}: {error}; {advice(error)}") from error
    return 0


def _show(models: Sequence[Mapping[str, Any]], size: int) -> None:
    head, rows = ("Model", "Weights", "Numerics", "Contract", "Answers", "Bytes", "Written"), []
    for model in models:
        facts = model["facts"]
        level = " ".join(str(facts[key]) for key in ("numerics", "dtype", "gpu_architecture") if key in facts)
        cells = [model["name"], str(facts.get("weights", "?"))[:12], level, str(facts.get("contract_version", "?"))]
        written = " to ".join(dict.fromkeys(_day(when) for when in (model["first"], model["last"]) if when is not None))
        cells += [f"{model['entries']:,}", f"{model['bytes']:,}", written]
        rows.append(cells)
    print_sheet(Sheet("Cache", head, rows, (0, 1, 2, 6)), Console(soft_wrap=True))
    say(f"{sum(model['entries'] for model in models):,} answers, {size:,} bytes on disk")


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
