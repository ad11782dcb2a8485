"""Checks that the weights, the model and the prompts on this machine are still those of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.errors import ConfigError
from evalengine.harness.identity import model_identity
from evalengine.harness.plan import Plan
from evalengine.records.differences import differences

MAX_LISTED = 5  # changed fields of the model that are listed
NAME_IT = "by --with model.path=..."


def check_weights(name: str, identity: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raises ConfigError for weights that are not those of the run called `name`. Hashes the files."""
    if weights_fingerprint(checkpoint) != identity["weights"]:
        raise ConfigError(f"{checkpoint.source}: these are not the weights of {name}; name them {NAME_IT}")


def check_model(name: str, identity: Mapping[str, Any], config: Config, llm: LLM) -> None:
    """Raises ConfigError for a model that differs from the run's in more than weights, as far as that is recorded."""
    now = model_identity(config, llm)
    pairs = [(identity[part], value, part) for part, value in now.items() if part in identity]
    if changed := [words for pair in pairs for words in differences(*pair)]:
        raise ConfigError(
            f"{llm.checkpoint.source}: no longer the model of {name}: {'; '.join(changed[:MAX_LISTED])}; restore its "
            f"configuration, or name the run's own model {NAME_IT}"
        )


def check_prompts(name: str, identity: Mapping[str, Any], plan: Plan) -> None:
    """Raises ConfigError for requests that are not the run's."""
    if plan.prompts_sha256 != identity["prompts"]:
        raise ConfigError(
            f"{name}: the rows, the tokenizer or the prompts made of them are no longer the run's; name the run's own "
            f"by --with data_dir=... or --with model.path=..."
        )
