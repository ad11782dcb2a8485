"""Makes a GPU's context while Python still imports: both take a second, and the driver needs neither torch nor Python's
lock. torch then finds the context made, since all libraries of a process share a device's primary context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

from evalengine.util import ahead
from evalengine.util.phases import phase

SETTING = "engine.device="
ELSEWHERE = ("cluster=ray", "cluster.", "cache=", "cache.path=")  # runs whose own process may need no GPU


def wake_gpu(words: Sequence[str]) -> None:
    """Begins to make the context of the GPU that the run's words choose, if there is one; returns at once."""
    device = device_of(words)
    if device is not None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:  # no GPU here, or no driver
            return
        ahead.begin("GPU", partial(_wake, driver, device))


def device_of(words: Sequence[str]) -> int | None:
    """The number of the GPU that a run with these words computes on, if the machine has one; None for none."""
    if any(word.startswith(ELSEWHERE) for word in words):
        return None
    named = [word.removeprefix(SETTING) for word in words if word.startswith(SETTING)]
    kind, _, number = (named or ["auto"])[-1].partition(":")
    if kind not in ("auto", "cuda") or (number and not number.isdecimal()):
        return None
    return int(number or 0)


@phase("GPU")
def _wake(driver: ctypes.CDLL, device: int) -> None:
    """Nothing is said of what fails: torch meets it again, and says what it means for the run."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(handle), device):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
