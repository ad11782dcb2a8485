"""The engine as runs and caches use it: an `LLM` in this process, or replicas of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from evalengine.config.schema import EngineConfig
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.settings import Settings
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import RequestLimits
from evalengine.models.spec import ModelSpec
from evalengine.util.libraries import installed_libraries

OnStep = Callable[[EngineStats], None] | None


@dataclass(frozen=True)
class EngineFacts:
    """An engine's machine, on which answers can depend as on settings and spec, its pool and its verdicts."""

    weights_sha256: str
    gpu_architecture: str | None  # as `sm_90`; None on a CPU
    libraries: dict[str, str | None]  # what `installed_libraries` gives there
    cluster: dict[str, Any] = field(default_factory=dict)  # the manifest's facts about replicas; {} without them
    num_kv_blocks: int | None = None  # pages of the pool; None before it is planned
    kernels: dict[str, Any] | None = None  # what `verify_heads` found; None before the weights are loaded
    self_test: dict[str, Any] | None = None  # the self-test's verdict; None where none was needed

    @classmethod
    def here(cls, checkpoint: Checkpoint, device: torch.device, **own: Any) -> EngineFacts:
        """Those of this process. own: the fields of one engine. Reads all weight files unless they have been hashed."""
        return cls(weights_fingerprint(checkpoint), gpu_architecture(device), installed_libraries(), **own)


class EngineProtocol(Protocol):
    """An engine as runs and caches use it."""

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
    def limits(self) -> RequestLimits: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def loaded(self) -> bool: ...

    def load(self) -> None: ...

    def facts(self) -> EngineFacts: ...

    def reset_prefix_cache(self) -> None: ...

    def run(self, requests: Iterable[Request], on_step: OnStep = None) -> Iterator[RequestOutput]: ...

    def close(self) -> None: ...


def gpu_architecture(device: torch.device) -> str | None:
    """The architecture of the GPU, as `sm_90`; None for a CPU."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
