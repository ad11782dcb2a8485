"""Benchmarks on the live GPU (`python -m evalengine bench ...`): each figure beside its comparison, from one run."""
