"""How long a function keeps the GPU busy, from a cold L2 cache.

Every repeat first goes over a buffer larger than the cache: weights that an engine streams once a step are never in L2.
The buffer is read, not overwritten as `triton.testing.do_bench` does: lines that were written go back to memory while
the function runs, and slow it down. Reading takes about 200 us on an H200, in which the host runs ahead; where a
function's launches take it longer than half of that, the buffer is read more often, so that launch overhead enters no
time. (Without this, products of 16 us "took" 97 us on a slow host.) A long function is better captured as a CUDA graph.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

CACHE_BYTES = 768 << 20  # read before each repeat; the L2 of an H200 holds 60 MB
CLEAR_SECONDS = 2e-4  # about the time of that read on an H200; it only sets the number of repeats
Key = TypeVar("Key")


def compare_gpu_seconds(
    functions: Mapping[Key, Callable[[], Any]], budget_s: float = 0.02, repeats: tuple[int, int] = (5, 100)
) -> dict[Key, float]:
    """Median time of each function's call, in seconds, with a cold L2.

    About `budget_s` of GPU time is spent on each, within `repeats` = (least, most) calls; two calls warm up before.
    The functions take turns, so that a clock that drifts (or a power limit) is the same for all: for ratios of times.
    """
    for function in functions.values():
        function()
    clears = 1 + int(max(map(_host_seconds, functions.values())) / (CLEAR_SECONDS / 2))
    first = [_timed(function, clears) for function in functions.values()]
    torch.cuda.synchronize()
    slowest = max(_elapsed(pair) for pair in first) + clears * CLEAR_SECONDS
    count = max(repeats[0], min(repeats[1], int(budget_s / slowest)))
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in functions}
    for _ in range(count):
        for key, function in functions.items():
            events[key].append(_timed(function, clears))
    torch.cuda.synchronize()
    return {key: statistics.median(map(_elapsed, pairs)) for key, pairs in events.items()}


def free_memory() -> None:
    """Gives cached blocks back before a large case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _host_seconds(function: Callable[[], Any]) -> float:
    """The minimum of three calls' times until the call returns, each on an idle GPU."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _timed(function: Callable[[], Any], clears: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(clears):
        _cache_filler(torch.cuda.current_device()).sum()
    start.record()
    function()
    end.record()
    return start, end


def _elapsed(pair: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    return pair[0].elapsed_time(pair[1]) / 1e3


@lru_cache(maxsize=1)
def _cache_filler(device: int) -> Tensor:
    return torch.ones(CACHE_BYTES // 4, dtype=torch.float32, device=f"cuda:{device}")
