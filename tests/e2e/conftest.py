"""The run that others are compared with."""

from __future__ import annotations

import pytest

from tests.e2e.command import LIMIT, Run, finished


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The first rows of the default task with every setting at its default: one batch, unbroken."""
    return finished(tmp_path_factory.mktemp("reference"), f"limit={LIMIT}")
