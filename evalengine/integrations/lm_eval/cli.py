"""`python -m evalengine lm_eval ...`: lm-eval's own command line, with `--model evalengine` registered before.

Versions of lm-eval that find models by entry points would find it themselves; this works with all versions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from evalengine.errors import ConfigError
from evalengine.util.plugins import not_installed

NAME = "evalengine"
TARGET = "evalengine.integrations.lm_eval.model:EvalEngineLM"


def main(argv: Sequence[str]) -> int:
    """Runs lm-eval with the words after `lm_eval`; returns the exit code.

    Raises: ConfigError if lm-eval is not installed.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm_eval", *argv]  # lm-eval reads its arguments there
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


def register() -> None:
    """Makes lm-eval know the model by its name, once.

    Raises: ConfigError if lm-eval is not installed.
    """
    if missing := not_installed("lm-eval", "lm_eval"):
        raise ConfigError(f"lm_eval: {missing}")
    try:
        import_module("lm_eval.models")  # some versions add their own models to an empty registry only
        from lm_eval.api import registry
    except ImportError as error:
        raise ConfigError(f"lm_eval: lm-eval cannot be imported ({error}): pip install 'lm-eval[hf]'") from error
    new_registry = getattr(registry, "model_registry", None)
    if new_registry is None:
        from evalengine.integrations.lm_eval.model import EvalEngineLM

        registry.MODEL_REGISTRY[NAME] = EvalEngineLM
    elif NAME not in new_registry:
        new_registry.register(NAME, target=TARGET)
