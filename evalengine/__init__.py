"""evalengine: LLM evaluation whose logprobs are equal bit for bit, whatever the schedule.

`LLM` and what it takes and gives are loaded on first use, so that `import evalengine` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
CONTRACT_VERSION = 2  # the arithmetic's version: any change of arithmetic raises it (CONTRIBUTING.md)
__all__ = [
    "CONTRACT_VERSION",
    "LLM",
    "GenerateRequest",
    "RequestOutput",
    "SamplingParams",
    "ScoreRequest",
    "__version__",
    "set_batch_invariant_mode",
]

if TYPE_CHECKING:
    from evalengine.engine.llm import LLM
    from evalengine.engine.request import GenerateRequest, RequestOutput, SamplingParams, ScoreRequest
    from evalengine.invariant import set_batch_invariant_mode

_LAZY = {
    "LLM": "evalengine.engine.llm",
    "GenerateRequest": "evalengine.engine.request",
    "RequestOutput": "evalengine.engine.request",
    "SamplingParams": "evalengine.engine.request",
    "ScoreRequest": "evalengine.engine.request",
    "set_batch_invariant_mode": "evalengine.invariant",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'evalengine' has no attribute {name!r}")
