"""Runs from disk: a run folder of ours, an output folder of lm-evaluation-harness, or a baseline file."""
