"""One server of the bundled model for the tests that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serve.running import Running


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    from tests.serve.running import running

    with running() as server:
        yield server
