"""The sub-commands' arguments and options, one module each; the module that does the work is imported after parsing."""

MODULES = {  # sub-command -> the module whose `main(argv)` answers it
    "compare": "evalengine.cli.commands.compare",
    "baseline": "evalengine.cli.commands.baseline",
    "gate": "evalengine.cli.commands.gate",
    "report": "evalengine.cli.commands.report",
    "explain": "evalengine.cli.commands.explain",
    "verify": "evalengine.cli.commands.verify",
    "bench": "evalengine.cli.commands.bench",
    "cache": "evalengine.cli.commands.cache",
    "prove": "evalengine.cli.commands.prove",
    "check": "evalengine.cli.commands.check",
    "plan": "evalengine.cli.commands.plan",
    "tasks": "evalengine.cli.commands.tasks",
    "lm_eval": "evalengine.lm_eval_model.cli",
}
