"""Runs, comparisons and verdicts as Python objects: what `evalengine.load_run`, `compare` and `gate` return."""
