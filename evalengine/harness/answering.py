"""The engine that answers a run's requests: an `LLM` in this process, or replicas of it (`evalengine.cluster`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol, cast

import torch

from evalengine.cluster.engines import RayEngines
from evalengine.cluster.settings import ray_problems, uses_ray
from evalengine.config.schema import Config, EngineConfig
from evalengine.engine.deferred import DeferredLLM
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.settings import Settings, settings_problems
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import Limits
from evalengine.models.spec import ModelSpec
from evalengine.records.libraries import installed_libraries


class Answering(Protocol):
    """The part of an `LLM` that the harness uses; replicas have it, too."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def num_kv_blocks(self) -> int: ...
    @property
    def kernels_verdict(self) -> dict[str, Any] | None: ...

    def reset_prefix_cache(self) -> None: ...

    def run(
        self, requests: Iterable[Request], on_step: Callable[[EngineStats], None] | None = None
    ) -> Iterator[RequestOutput]: ...


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
            yield cast(Answering, deferred)  # a DeferredLLM has all that a run asks of its own engine


def answering_problems(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    """Yields what is wrong with the settings of the engine and its replicas, a sentence each. On a remote Ray cluster
    the first replica checks its engine's settings, since another machine computes."""
    yield from ray_problems(config)
    if config.cluster.address is None:
        yield from settings_problems(config.engine, config.batch_invariant, config.numerics, spec)


def weights_sha256(llm: Answering) -> str:
    """SHA-256 of the weight files; reads all of them, unless the replicas have hashed them already."""
    return llm.weights_sha256 if isinstance(llm, RayEngines) else weights_fingerprint(llm.checkpoint)


def gpu_architecture(llm: Answering) -> str:
    """The architecture of the GPU that computes, as `sm_90`."""
    if isinstance(llm, RayEngines):
        return str(llm.first.gpu_architecture)
    return "sm_{}{}".format(*torch.cuda.get_device_capability(llm.settings.device))


def libraries(llm: Answering) -> dict[str, str | None]:
    """The versions of what an answer can depend on, where it is computed: all replicas have the first one's."""
    return llm.first.libraries if isinstance(llm, RayEngines) else installed_libraries()


def cluster_facts(llm: Answering) -> dict[str, Any]:
    """The manifest's facts about replicas: their roster, and the first one's hardware; {} without replicas."""
    if not isinstance(llm, RayEngines):
        return {}
    return {"cluster": llm.roster.facts(), "hardware": asdict(llm.first.hardware)}
