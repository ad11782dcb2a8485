"""inspect_ai's entry point: it registers the model's name before anything heavy is imported."""

from __future__ import annotations

from typing import Any

from inspect_ai.model import modelapi


@modelapi(name="evalengine")
def evalengine() -> Any:
    """The provider's class."""
    from evalengine.integrations.inspect_ai.provider import EvalEngineAPI

    return EvalEngineAPI
