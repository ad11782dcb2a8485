"""What is measured of this project, beside its comparison: `python -m benchmarks ...`, from a checkout."""
