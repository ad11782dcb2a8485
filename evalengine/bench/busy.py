"""The share of wall-clock time in which the GPU runs a kernel, in steady decode; the rest is the host's cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from evalengine.engine.llm import LLM
from evalengine.engine.request import Request
from evalengine.engine.stats import EngineStats

STEADY_STEPS = 10  # consecutive steps of decodes alone before the profile begins
PROFILED_STEPS = 60
HEAD = 0.1  # first part of the profile's time, left out because the profiler's own start holds the host up


class _Enough(Exception):
    """The profile is complete; the rest of the run is not wanted."""


class _Window:
    """A callback for every step, which profiles `PROFILED_STEPS` of steady decode and then ends the run."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.computed = llm.stats.num_computed_tokens
        self.steady = 0
        self.profiled: int | None = None  # steps profiled so far; None before the profile begins

    def __call__(self, stats: EngineStats) -> None:
        tokens, self.computed = stats.num_computed_tokens - self.computed, stats.num_computed_tokens
        if self.profiled is None:
            decodes = not self.llm.scheduler.waiting and tokens <= len(self.llm.scheduler.running)
            self.steady = self.steady + 1 if decodes else 0
            if self.steady == STEADY_STEPS:
                self.profiler.start()
                self.profiled = 0
            return
        self.profiled += 1
        if self.profiled == PROFILED_STEPS:
            raise _Enough


def gpu_busy_share(llm: LLM, requests: Sequence[Request]) -> float | None:
    """The busy share of `PROFILED_STEPS` decode steps amid a run of the requests; None without CUDA or enough steps."""
    if llm.settings.device.type != "cuda":
        return None
    window = _Window(llm)
    with suppress(_Enough):
        for _ in llm.run(requests, window):
            pass
    if window.profiled is None:
        return None
    torch.cuda.synchronize()
    window.profiler.stop()
    events = [event for event in window.profiler.events() or [] if event.device_type == DeviceType.CUDA]
    kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    return busy_share((e.time_range.start, e.time_range.end) for e in kernels)


def busy_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """The length of the intervals' union over the time from the first start to the last end, without the first
    `HEAD` of that time; None without intervals."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, last = ordered[0][0], max(end for _, end in ordered)
    start = first + HEAD * (last - first)
    busy, reached = 0.0, start
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / (last - start) if last > start else None
