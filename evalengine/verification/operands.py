"""Random operands for the comparisons, and compiling their kernels beforehand, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

COMPILE_THREADS = min(16, os.cpu_count() or 1)  # Each thread holds one output.


class Random:
    """Seeded normal numbers on the device; every call returns other numbers."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)


def compile_all(runs: Sequence[Callable[[], Tensor]], device: torch.device) -> None:
    """Makes the runs side by side, so that Triton compiles on every core: one after another, a model's kernels take
    minutes.

    A run that fails here fails again when it is compared, and is reported then.
    """
    if device.type != "cuda":
        return

    def quietly(run: Callable[[], Tensor]) -> None:
        with suppress(Exception), torch.inference_mode(), torch.cuda.device(device):
            run()

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(quietly, runs))
