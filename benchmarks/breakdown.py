"""Where a step's GPU time goes: the kernels of one layer, in order, with their median time over the layers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME_LENGTH = 80  # characters of a kernel's name
MOST_NAMES = 20


def breakdown(step: Callable[[], Any], num_layers: int) -> dict[str, Any]:
    """Launches and microseconds of one call, its kernels by total time, and one layer's kernels in order."""
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return summarize([(event.name[:NAME_LENGTH], event.time_range.elapsed_us()) for event in events], num_layers)


def summarize(kernels: Sequence[tuple[str, float]], num_layers: int) -> dict[str, Any]:
    """(name, microseconds) of each launch, in order -> `breakdown`'s result."""
    totals: Counter[str] = Counter()
    for name, microseconds in kernels:
        totals[name] += microseconds  # type: ignore[assignment]  # a Counter of floats
    result: dict[str, Any] = {
        "launches": len(kernels),
        "kernels_us": round(sum(totals.values()), 1),
        "by_kernel_us": {name: round(value, 1) for name, value in totals.most_common(MOST_NAMES)},
    }
    pattern = find_repeats([name for name, _ in kernels], num_layers)
    if pattern:
        start, period = pattern
        repeats = range(start, start + period * (num_layers - 2), period)
        result["one_layer_us"] = [
            (kernels[start + i][0], round(statistics.median(kernels[first + i][1] for first in repeats), 2))
            for i in range(period)
        ]
    return result


def find_repeats(names: Sequence[str], num_layers: int) -> tuple[int, int] | None:
    """(start, period) of the shortest pattern that repeats at least `num_layers - 2` times in a row; None if none does.

    The first and the last layer may differ from the others at their ends, so two fewer repeats than layers suffice.
    """
    for period in range(1, len(names) // max(1, num_layers - 2) + 1):
        run, needed = 0, period * (num_layers - 3)
        for i in range(len(names) - period):
            run = run + 1 if names[i] == names[i + period] else 0
            if needed > 0 and run == needed:
                return i - run + 1, period
    return None
