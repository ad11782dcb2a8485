"""The task that an endpoint is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endpoint.asking import write_sums


@pytest.fixture
def sums(tmp_path: Path) -> list[str]:
    """A task of sums in a file of its own, and the settings that every run here has."""
    return write_sums(tmp_path)
