"""Fixtures of the tests that run programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from evalengine.programs import run as run_module
from evalengine.programs.run import problem
from tests.unit.hostile_programs import SYSTEM_PYTHON


@pytest.fixture(scope="module", params=[True, False], ids=["isolated", "without isolation"])
def isolated(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether programs are isolated: each way that this machine has; unisolated, perhaps by the system's Python."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            if (why := problem(True)) is not None:
                pytest.skip(f"programs cannot be isolated here: {why}")
        elif problem(False) is not None:
            patch.setattr(sys, "executable", SYSTEM_PYTHON)
            patch.setattr(run_module, "PROBE", "import decimal")  # the system's Python may lack NumPy
            problem.cache_clear()
            if (why := problem(False)) is not None:
                pytest.skip(f"programs cannot be run here: {why}")
        yield request.param
    problem.cache_clear()


@pytest.fixture
def kernel_isolates() -> None:
    """Skips the test where programs cannot be isolated."""
    if (why := problem(True)) is not None:
        pytest.skip(f"programs cannot be isolated here: {why}")
