"""The runs that tests compare others with, each made once per pytest worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.cache_runs import run
from tests.e2e.command import LIMIT, SHORT, Run, finished


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The first rows of the default task with every setting at its default: one batch, unbroken."""
    return finished(tmp_path_factory.mktemp("reference"), f"limit={LIMIT}")


@pytest.fixture(scope="session")
def short_reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """As `reference`, but its answers are cut: for the comparison of bits, which needs no right answer."""
    return finished(tmp_path_factory.mktemp("short"), f"limit={LIMIT}", SHORT)


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A cache's folder that holds the answers of a run, and that run."""
    root = tmp_path_factory.mktemp("warm")
    return root / "cache", run(root / "out", f"cache={root / 'cache'}")


@pytest.fixture
def copied_cache(warm_cache: tuple[Path, Run], tmp_path: Path) -> Path:
    """A copy of `warm_cache`'s folder, for a test that changes it."""
    return Path(shutil.copytree(warm_cache[0], tmp_path / "copied"))
