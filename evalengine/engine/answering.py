"""What answers requests: an `LLM` in this process, one whose weights are yet to be loaded, or replicas of it."""

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
    """What answers can depend on besides the settings and the spec, where they are computed."""

    weights_sha256: str
    gpu_architecture: str | None  # as `sm_90`; None on a CPU
    libraries: dict[str, str | None]  # what `installed_libraries` gives there
    cluster: dict[str, Any] = field(default_factory=dict)  # the manifest's facts about replicas; {} without them

    @classmethod
    def here(cls, checkpoint: Checkpoint, device: torch.device) -> EngineFacts:
        """That of this process. Reads all weight files, unless they have been hashed already."""
        return cls(weights_fingerprint(checkpoint), gpu_architecture(device), installed_libraries())


class Answering(Protocol):
    """The part of an `LLM` that runs and caches use."""

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
    def num_kv_blocks(self) -> int | None: ...
    @property
    def kernels_verdict(self) -> dict[str, Any] | None: ...
    @property
    def self_test_verdict(self) -> dict[str, Any] | None: ...
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
