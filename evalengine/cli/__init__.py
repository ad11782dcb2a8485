"""The sub-commands' arguments and options; the module that does the work is imported after parsing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {  # sub-command -> the module whose `main(argv)` answers it, or another function of it
    "compare": "evalengine.cli.compare",
    "baseline": "evalengine.cli.written:baseline",
    "gate": "evalengine.cli.gate",
    "report": "evalengine.cli.written:report",
    "explain": "evalengine.cli.explain",
    "verify": "evalengine.cli.verify",
    "bench": "evalengine.cli.bench",
    "cache": "evalengine.cli.cache",
    "prove": "evalengine.cli.receipts:prove",
    "check": "evalengine.cli.receipts:check",
    "plan": "evalengine.cli.plan",
    "serve": "evalengine.cli.serve",
    "warm": "evalengine.cli.warm",
    "tasks": "evalengine.cli.tasks",
    "lm_eval": "evalengine.integrations.lm_eval.cli",
}


def command_of(name: str) -> Any:
    """Return the function of a sub-command: it takes the words after it and returns the exit code."""
    module, _, function = MODULES[name].partition(":")
    return getattr(import_module(module), function or "main")
