"""Opens what answers a run's requests: an `LLM` in this process, or replicas of it on Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.engine import Engine
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.settings import settings_problems, uses_ray
from evalengine.errors import EvalEngineError
from evalengine.models.spec import ModelSpec
from evalengine.records.folder import RECORDS
from evalengine.records.schema import read_records
from evalengine.util.plugins import load


@contextmanager
def answering(config: Config, checkpoint: Checkpoint, loaded: EngineProtocol | None) -> Iterator[EngineProtocol]:
    """An engine for this run alone, its weights yet to be loaded, or replicas, as its cluster settings say; or the one
    that is loaded already, with its prefix cache emptied: under fast numerics bits could depend on cached prefixes."""
    if loaded is not None:
        loaded.reset_prefix_cache()
        if config.drafts is not None and isinstance(loaded, Engine):
            loaded.learn_answers(_generated(config.drafts))
        yield loaded
    elif uses_ray(config):
        with load("evalengine.integrations.ray.engines:RayEngines")(config, checkpoint) as engines:
            yield engines
    else:
        with deferred_llm(config, checkpoint) as deferred:
            if config.drafts is not None:
                deferred.learn_answers(_generated(config.drafts))
            yield deferred


def deferred_llm(config: Config, checkpoint: Checkpoint) -> LLM:
    """The engine of the configuration, which loads its weights when they are first needed."""
    mode: Any = {"batch_invariant": config.batch_invariant, "numerics": config.numerics}
    return LLM(checkpoint, **mode, engine=config.engine, load=False)


def _generated(folder: str) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The prompts of a run's generations, and what was answered. Raises EvalEngineError for a damaged file."""
    try:
        records = read_records(Path(folder) / RECORDS)
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        raise EvalEngineError(f"drafts={folder}: its {RECORDS} cannot be read: {error}; name another run") from error
    for record in records:
        if record.kind == "generate_until":
            yield record.prompt_ids, record.output_ids


def answering_problems(config: Config, spec: ModelSpec | None) -> Iterator[str]:
    """Yields what is wrong with the settings of the engine and its replicas, a sentence each. On a remote Ray cluster
    the first replica checks its engine's settings, since another machine computes."""
    if uses_ray(config):
        yield from load("evalengine.integrations.ray.pool:ray_problems")(config)
    elif config.cluster.audit > 0:
        audit = f"cluster.audit={config.cluster.audit}"
        yield f"{audit}: it needs a second replica, and this machine's GPUs suffice for one"
    if config.cluster.address is None:
        yield from settings_problems(config.engine, config.batch_invariant, config.numerics, spec)
