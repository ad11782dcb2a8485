"""The project's benchmarks that `evalengine bench` does not contain: `python -m benchmarks ...`, from a checkout."""
