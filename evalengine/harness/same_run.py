"""A finished run planned again from its folder: its rows, tokenizer, weights and model must be unchanged.

What `explain`, `prove` and `check` compute again, they compute through this: the run's configuration, its plan, and an
engine that loads its weights when the first request runs. `engine.difference` then says where two answers part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.config.compose import COMPUTED_AGAIN, read_config
from evalengine.config.schema import ClusterConfig, Config
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import resolve_checkpoint, weights_fingerprint
from evalengine.errors import ConfigError
from evalengine.harness.answering import deferred_llm
from evalengine.harness.asked import SERVED, in_order, read_asked
from evalengine.harness.identity import model_identity
from evalengine.harness.plan import Plan, build_plan, prepare
from evalengine.harness.requests import requests_sha256
from evalengine.records.differences import differences
from evalengine.records.evidence import ASKED, CONFIG

MAX_LISTED = 5  # changed fields of the model that are listed
NAME_IT = "by --with model.path=..."


def config_again(folder: Path, pinned: Mapping[str, Any], words: Sequence[str]) -> Config:
    """The configuration of the run in `folder`, for one process that reads and keeps no answers.

    pinned: fields of the engine's settings that are not the file's. words: settings that hold over both.
    """
    given = {word.lstrip("+").partition("=")[0] for word in words}
    settings = {f"engine.{name}": "null" if value is None else value for name, value in pinned.items()}
    pins = [f"{name}={value}" for name, value in settings.items() if name not in given]
    config = read_config(folder / CONFIG, (*COMPUTED_AGAIN, *pins, *words), selects=not (folder / ASKED).exists())
    return replace(config, cluster=ClusterConfig())


def plan_again(
    name: str, identity: Mapping[str, Any], config: Config, folder: Path, same_model: bool = True
) -> tuple[Plan, LLM]:
    """The plan of the run called `name`, whose recorded identity is given, and an engine without weights yet.

    folder: the run's, which holds the requests of a server. same_model: whether the model must be the run's. Raises
    ConfigError for weights (whose files it hashes), a model or requests that are not the run's.
    """
    served = identity.get("harness") == SERVED
    checkpoint, tasks = (resolve_checkpoint(config.model), []) if served else prepare(config, scores=False)
    if same_model and weights_fingerprint(checkpoint) != identity["weights"]:
        raise ConfigError(f"{checkpoint.source}: these are not the weights of {name}; name them {NAME_IT}")
    llm = deferred_llm(config, checkpoint)
    now = model_identity(config, llm) if same_model else {}
    pairs = [(identity[part], value, part) for part, value in now.items() if part in identity]
    if changed := [words for pair in pairs for words in differences(*pair)]:
        raise ConfigError(
            f"{checkpoint.source}: no longer the model of {name}: {'; '.join(changed[:MAX_LISTED])}; restore its "
            f"configuration, or name the run's own model {NAME_IT}"
        )
    plan = _as_served(folder) if served else build_plan(config, tasks, llm)
    if plan.prompts_sha256 != identity["prompts"]:
        raise ConfigError(
            f"{name}: the rows, the tokenizer or the prompts made of them are no longer the run's; name the run's own "
            f"by --with data_dir=... or --with model.path=..."
        )
    return plan, llm


def _as_served(folder: Path) -> Plan:
    """The plan of a run whose requests clients made."""
    requests = in_order(read_asked(folder))
    return Plan([], requests, prompts_sha256=requests_sha256((item.key, item.request) for item in requests))
