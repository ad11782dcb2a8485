"""What the tests of `verify` share: a cache of their own, and data whose products are exact in any order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evalengine.verification import operands
from evalengine.verification.verdict import MODULES

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


class Integers:
    """Stands in for `operands.Random`, with integers from -2 to 2."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=self._generator).to(self._dtype).to(DEVICE)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Gives each test a cache of its own, no excluded schedules, and exact data under the interpreter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not GPU:
        monkeypatch.setattr(operands, "Random", Integers)
    for module in MODULES.values():
        monkeypatch.setattr(module, "excluded", set())
    yield
