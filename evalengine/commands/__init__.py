"""The sub-commands' words, a module each: what does the work is imported once the words are good."""

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
    "tasks": "evalengine.commands.tasks",
    "lm_eval": "evalengine.lm_eval_model.cli",
}
