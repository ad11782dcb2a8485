"""What the tests of `verify` share: settings for a CPU, few requests, and a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.certify.cases import Effort

ROOT = Path(__file__).parents[2]
CPU = ("engine.device=cpu", "numerics=exact")
TINY = Effort(100, (2, 18, 90), (15,), 6, 4, (40,), 30, 1, 1, 0, 2, 5)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test's certificates go to results/ below its own folder; a new process still finds the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
