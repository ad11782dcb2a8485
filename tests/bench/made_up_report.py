"""A report of made-up times."""

from __future__ import annotations

from benchmarks.report import Failure, Measurements, Timing


def a_report() -> Measurements:
    """Three lines: a missed target, a reached target, and a wrong result."""
    lines = [
        Timing("rows", "8 | 9", 2e-4, "copy", 1e-4, "speed", 0.85, work=4e8, unit="TB/s"),
        Timing("step", "decode", 2e-3, "fast", 2e-3, "time", 1.03),
        Failure("rows", "wrong one", "relative error 1.0e+00"),
    ]
    return Measurements(list(lines), {"profile": {"kernel": 1.5}})
