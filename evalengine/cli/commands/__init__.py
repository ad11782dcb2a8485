"""The sub-commands' arguments and options; the module that does the work is imported after parsing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {  # sub-command -> the module whose `main(argv)` answers it, or another function of it
    "compare": "evalengine.cli.commands.compare",
    "baseline": "evalengine.cli.commands.written:baseline",
    "gate": "evalengine.cli.commands.gate",
    "report": "evalengine.cli.commands.written:report",
    "explain": "evalengine.cli.commands.explain",
    "verify": "evalengine.cli.commands.verify",
    "bench": "evalengine.cli.commands.bench",
    "cache": "evalengine.cli.commands.cache",
    "prove": "evalengine.cli.commands.receipts:prove",
    "check": "evalengine.cli.commands.receipts:check",
    "plan": "evalengine.cli.commands.plan",
    "serve": "evalengine.cli.commands.serve",
    "warm": "evalengine.cli.commands.warm",
    "tasks": "evalengine.cli.commands.tasks",
    "lm_eval": "evalengine.lm_eval_model.cli",
}


def command_of(name: str) -> Any:
    """What answers a sub-command: a function of the words after it, which returns the exit code."""
    module, _, function = MODULES[name].partition(":")
    return getattr(import_module(module), function or "main")
