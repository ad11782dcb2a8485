"""Opens what answers a run's requests: an `LLM` in this process, or replicas of it (`evalengine.cluster`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evalengine.cluster.engines import RayEngines
from evalengine.cluster.settings import ray_problems, uses_ray
from evalengine.config.schema import Config
from evalengine.engine.answering import Answering
from evalengine.engine.deferred import DeferredLLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.settings import settings_problems
from evalengine.models.spec import ModelSpec


@contextmanager
def answering(config: Config, checkpoint: Checkpoint, loaded: Answering | None) -> Iterator[Answering]:
    """An engine for this run alone, its weights yet to be loaded, or replicas, as its cluster settings say; or the one
    that is loaded already, with its prefix cache emptied: under fast numerics bits could depend on cached prefixes."""
    if loaded is not None:
        loaded.reset_prefix_cache()
        yield loaded
    elif uses_ray(config):
        with RayEngines(config, checkpoint) as engines:
            yield engines
    else:
        mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
        with DeferredLLM(checkpoint, **mode, engine=config.engine) as deferred:
            yield deferred


def answering_problems(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    """Yields what is wrong with the settings of the engine and its replicas, a sentence each. On a remote Ray cluster
    the first replica checks its engine's settings, since another machine computes."""
    yield from ray_problems(config)
    if config.cluster.address is None:
        yield from settings_problems(config.engine, config.batch_invariant, config.numerics, spec)
