"""Puts the cache that a run's configuration names, if any, before its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from evalengine.cache.engine import CachedEngine
from evalengine.cache.keys import Computer
from evalengine.cache.store import CacheUnavailableError, Store
from evalengine.config.schema import Config
from evalengine.engine.answering import Answering
from evalengine.engine.request import Request
from evalengine.engine.submission import check_requests
from evalengine.harness.plan import Plan, request_names
from evalengine.plain_text import warn


@contextmanager
def through_cache(
    config: Config, llm: Answering, identity: Mapping[str, Any], name: Callable[[Request], str]
) -> Iterator[CachedEngine | None]:
    """The engine whose answers `cache.path` keeps; None where no cache is set.

    identity: that of the engine (`engine_identity`), or a whole run's. name: gives a request's name in messages.
    Raises ConfigError for a folder that can be no cache. One that is locked, or whose disk is full, is done without.
    """
    if config.cache.path is None:
        yield None
        return
    failed = None
    try:
        opened = Store.open(config.cache.path)
    except CacheUnavailableError as error:  # the cache only saves time: its failure must not end a run
        opened, failed = Store.empty(config.cache.path), str(error)
        warn(f"{error}; the run goes on without the cache")
    with opened as store:
        computer = Computer.of(config.model.name, identity, llm.facts().libraries)
        cached = CachedEngine(llm, store, computer, audit=config.cache.audit, seed=config.seed, name=name)
        cached.counts.failed = failed
        yield cached


@contextmanager
def open_answer_cache(
    config: Config, plan: Plan, llm: Answering, identity: Mapping[str, Any]
) -> Iterator[CachedEngine | None]:
    """`through_cache` for a run's plan. Kept answers are read at once, and the weights are loaded if one is missing:
    requests that no pool can hold are refused before anything is written, as in a run without a cache."""
    name = request_names(plan.requests)
    with through_cache(config, llm, identity, name) as cached:
        requests = [item.request for item in plan.requests]
        if cached is not None and cached.look_up(requests) and not llm.loaded:
            llm.load()
            check_requests(requests, llm.limits, name)
        yield cached
