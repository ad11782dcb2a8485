"""Benchmarks for users' machines (`python -m evalengine bench ...`): end-to-end runs of the engine."""
