"""The sub-commands' arguments and options; the module that does the work is imported after parsing."""

from __future__ import annotations

from typing import Any

from evalengine.util.plugins import load

MODULES = {  # sub-command -> the function that answers it: `main(argv)`
    "compare": "evalengine.cli.compare:main",
    "baseline": "evalengine.cli.written:baseline",
    "gate": "evalengine.cli.gate:main",
    "report": "evalengine.cli.written:report",
    "explain": "evalengine.cli.explain:main",
    "verify": "evalengine.cli.verify:main",
    "bench": "evalengine.cli.bench:main",
    "cache": "evalengine.cli.cache:main",
    "prove": "evalengine.cli.receipts:prove",
    "check": "evalengine.cli.receipts:check",
    "plan": "evalengine.cli.plan:main",
    "serve": "evalengine.cli.serve:main",
    "warm": "evalengine.cli.warm:main",
    "tasks": "evalengine.cli.tasks:main",
    "lm_eval": "evalengine.integrations.lm_eval.cli:main",
}


def command_of(name: str) -> Any:
    """Return the function of a sub-command: it takes the words after it and returns the exit code."""
    return load(MODULES[name])
