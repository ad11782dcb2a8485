"""A run on disk: the run folder, its records, digest, manifest and lm-eval files.

Nothing here knows the engine, so that a report reads a run on a machine that could not have run it.
"""
