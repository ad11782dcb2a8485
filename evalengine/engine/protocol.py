"""The engine as runs and caches use it: an `LLM` in this process, or replicas of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from evalengine.config.schema import EngineConfig
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.settings import Settings
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import RequestLimits

OnStep = Callable[[EngineStats], None] | None


@dataclass(frozen=True)
class EngineFacts:
    """How an engine is set, where it computes, its pool and its verdicts. Replicas send theirs."""

    config: EngineConfig
    settings: Settings  # `config` as it was resolved there
    limits: RequestLimits  # before the pool is planned, without the pool's
    loaded: bool  # whether the weights are loaded
    num_kv_blocks: int | None  # pages of the pool; None before it is planned
    gpu_architecture: str | None  # as `sm_90`; None on a CPU
    libraries: dict[str, str | None]  # what `installed_libraries` gives there
    kernels: dict[str, Any] | None = None  # what `verify_heads` found; None before the weights are loaded
    self_test: dict[str, Any] | None = None  # the self-test's verdict; None where none was needed
    cluster: dict[str, Any] = field(default_factory=dict)  # the manifest's facts about replicas; {} without them


class EngineProtocol(Protocol):
    """An engine as runs and caches use it."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The model: its spec, its tokenizer and its weight files."""

    @property
    def stats(self) -> EngineStats: ...

    def facts(self) -> EngineFacts: ...

    def load(self) -> None: ...

    def run(self, requests: Iterable[Request], on_step: OnStep = None) -> Iterator[RequestOutput]: ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...


def gpu_architecture(device: torch.device) -> str | None:
    """The architecture of the GPU, as `sm_90`; None for a CPU."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
