"""The sub-commands' arguments and options, one module each; the module that does the work is imported after parsing."""

MODULES = {  # sub-command -> the module whose `main(argv)` answers it
    "compare": "evalengine.commands.compare",
    "baseline": "evalengine.commands.baseline",
    "gate": "evalengine.commands.gate",
    "report": "evalengine.commands.report",
    "explain": "evalengine.commands.explain",
    "verify": "evalengine.commands.verify",
    "bench": "evalengine.commands.bench",
    "cache": "evalengine.commands.cache",
    "prove": "evalengine.commands.prove",
    "check": "evalengine.commands.check",
    "plan": "evalengine.commands.plan",
    "tasks": "evalengine.commands.tasks",
    "lm_eval": "evalengine.lm_eval_model.cli",
}
