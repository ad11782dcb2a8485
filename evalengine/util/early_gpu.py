"""Makes a GPU's context, and Triton's hash of itself, in threads while Python imports: each takes up to a second, in
which neither needs Python's lock. torch finds the context made, since all libraries of a process share a device's
primary context.

A process is forked only where no such thread runs (`wait`): the child would inherit locks that no one releases.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from evalengine.util.phases import phase

SETTING = "engine.device="
ELSEWHERE = ("cluster=ray", "cluster.", "cache=", "cache.path=")  # runs whose own process may need no GPU
_threads: list[threading.Thread] = []


def wake_gpu(words: Sequence[str]) -> None:
    """Begins to make the context of the GPU that the run's words choose, if there is one; returns at once."""
    device = device_of(words)
    if device is not None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:  # no GPU here, or no driver
            return
        _begin(partial(_wake, driver, device))


def begin_triton_key() -> None:
    """Begins the hash of all of Triton, 460 MB, by which it names what it compiles: 0.3 s at the first kernel."""
    torch = sys.modules.get("torch")
    if "triton" in sys.modules and torch is not None and torch.cuda.is_available():
        _begin(_triton_key)


def wait() -> None:
    """Returns once all that was begun has ended."""
    while _threads:
        _threads.pop().join()


def device_of(words: Sequence[str]) -> int | None:
    """The number of the GPU that a run with these words computes on, if the machine has one; None for none."""
    if any(word.startswith(ELSEWHERE) for word in words):
        return None
    named = [word.removeprefix(SETTING) for word in words if word.startswith(SETTING)]
    kind, _, number = (named or ["auto"])[-1].partition(":")
    if kind not in ("auto", "cuda") or (number and not number.isdecimal()):
        return None
    return int(number or 0)


def _begin(work: Callable[[], None]) -> None:
    """Errors are ignored in the thread: the code that needs the work done meets them again."""
    thread = threading.Thread(target=work, name="evalengine GPU", daemon=True)
    _threads.append(thread)
    thread.start()


@phase("GPU")
def _wake(driver: ctypes.CDLL, device: int) -> None:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(handle), device):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _triton_key() -> None:
    with suppress(Exception), phase("Triton's hash"):
        from triton.runtime.cache import triton_key

        triton_key()  # it remembers the result
