"""evalengine: LLM evaluation whose logprobs are equal bit for bit, whatever the schedule.

`evaluate`, `compare`, `gate` and `load_run` do what the commands do (README.md next to this file). Each name is loaded
on first use, so that `import evalengine` stays cheap.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from evalengine.version import CONTRACT_VERSION, __version__

__all__ = [
    "CONTRACT_VERSION",
    "LLM",
    "ConfigError",
    "EvalEngineError",
    "GenerateRequest",
    "ModelConfig",
    "RequestOutput",
    "Results",
    "SamplingParams",
    "ScoreRequest",
    "__version__",
    "compare",
    "evaluate",
    "gate",
    "load_run",
    "set_batch_invariant_mode",
]

# In a checkout without symlinks (a ZIP archive, Windows, an sdist) these folders are only next to the package.
if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    __path__.append(os.path.dirname(__path__[0]))

# Waiting OpenMP threads sleep soon: threads that spin starve each other on a busy machine. 20 rows of the default run
# on two cores that other programs use take 73 s with libgomp's own spinning and 6.6 s with this; 200 rows on idle cores
# take 12 and 16 s. It stands here as libgomp reads it when torch is imported, which any name below may do.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from evalengine.api.evaluate import evaluate
    from evalengine.config.schema import ModelConfig
    from evalengine.engine.llm import LLM
    from evalengine.engine.request import GenerateRequest, RequestOutput, SamplingParams, ScoreRequest
    from evalengine.errors import ConfigError, EvalEngineError
    from evalengine.invariant import set_batch_invariant_mode
    from evalengine.report.python.results import Results, compare, gate, load_run

_LAZY = {
    "LLM": "evalengine.engine.llm",
    "GenerateRequest": "evalengine.engine.request",
    "RequestOutput": "evalengine.engine.request",
    "SamplingParams": "evalengine.engine.request",
    "ScoreRequest": "evalengine.engine.request",
    "set_batch_invariant_mode": "evalengine.invariant",
    "ConfigError": "evalengine.errors",
    "EvalEngineError": "evalengine.errors",
    "ModelConfig": "evalengine.config.schema",
    "Results": "evalengine.report.python.results",
    "compare": "evalengine.report.python.results",
    "evaluate": "evalengine.api.evaluate",
    "gate": "evalengine.report.python.results",
    "load_run": "evalengine.report.python.results",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'evalengine' has no attribute {name!r}")
