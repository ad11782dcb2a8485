"""The browser that opens pages, one for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import Browser, executable


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium; without it the test skips and says so."""
    if executable() is None:
        pytest.skip("needs Chromium: install Debian's package `chromium` (apt-get install chromium)")
    with Browser() as running:
        yield running
