"""Fixtures of the tests that run programs, and of those that read what Hydra composes of a shipped task."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.integrations.sandbox import run as run_module
from evalengine.integrations.sandbox.run import problem
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
def temporary() -> Iterator[Path]:
    """A folder of temporary files for this test alone. Programs run as another user, who may not enter `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="test-of-programs-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def task_alone() -> Callable[[str], Config]:
    """The configuration that `task=NAME` gives, composed once: Hydra takes seconds for a group of fifty tasks."""

    @functools.cache
    def composed(name: str) -> Config:
        (job,) = compose_jobs([f"task={name}"])
        return job.config

    return composed
