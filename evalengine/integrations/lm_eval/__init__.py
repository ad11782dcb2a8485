"""evalengine as a model of lm-evaluation-harness: `lm_eval --model evalengine`, or `python -m evalengine lm_eval`."""

LOGGER = "lm_eval.models.evalengine"  # a child of lm-eval's logger, whose settings decide what is shown
