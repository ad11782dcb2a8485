"""Compiles the kernels of a comparison side by side, before it: one after another, a model's kernels take minutes.

The comparison is rehearsed: it makes its operands and calls every kernel, but no kernel runs. Triton hands over what it
would compile (`triton.AsyncCompileMode`), and as many forked processes as there are cores put it into Triton's cache on
disk: most of a compilation holds Python's lock, so that threads wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from evalengine.kernels.launching.launch import observed_launches
from evalengine.util.forked import ForkedTask, cores
from evalengine.verification.verdict import KernelsVerdict

MOST = 16  # processes, or threads where no process can be forked

Work = Callable[[], Any]


class DryRun(KernelsVerdict):
    """A verdict on nothing: what it is to compare is called, and its results are looked at by nobody."""

    def compare(self, kernel: str, schedule: Any, where: str, run: Callable[[], Tensor], expected: Tensor) -> None:
        with suppress(Exception):  # it fails again where it counts
            run()

    def require_equal(self, what: str, found: Tensor, expected: Tensor) -> None:
        pass

    def fail(self, why: str) -> None:
        pass


class _Postponed(Executor):
    """Does nothing yet: it holds the work that it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Work]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, partial(work, *args, **kwargs)))
        return future


def compile_ahead(comparisons: Sequence[Callable[[KernelsVerdict], None]], device: torch.device) -> None:
    """Compiles all kernels that the comparisons call on this GPU. What fails here fails again where it counts."""
    postponed = _Postponed()
    with triton.AsyncCompileMode(postponed, ignore_errors=True), torch.inference_mode(), torch.cuda.device(device):
        try:
            dry_run(comparisons, _compile)
            in_processes([work for _, work in postponed.given])
            with ThreadPoolExecutor(MOST) as pool:  # it only reads what is in the cache now
                list(pool.map(_settle, *zip(*postponed.given, strict=True)) if postponed.given else ())
        finally:
            for future, _ in postponed.given:  # Triton waits for each of them
                future.cancel()


def dry_run(comparisons: Sequence[Callable[[KernelsVerdict], None]], observer: Callable[..., None]) -> None:
    """Calls `observer` with every launch that the comparisons would make."""
    with observed_launches(observer):
        for compare in comparisons:
            with suppress(Exception):
                compare(DryRun())


def in_processes(works: Sequence[Work]) -> None:
    """Does all of it, each in one of several processes, or of several threads where no process can be forked. What one
    of them raises is lost."""
    processes = min(cores(), MOST, len(works))
    if processes < 2:
        with ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda work: _quietly([work]), works))
        return
    with ExitStack() as started:
        others = [partial(_quietly, works[number::processes]) for number in range(1, processes)]
        helpers = [started.enter_context(ForkedTask(work)) for work in others]
        _quietly(works[::processes])
        for helper in helpers:
            helper.result()


def _quietly(works: Sequence[Work]) -> None:
    for work in works:
        with suppress(Exception):
            work()


def _settle(future: Future[Any], work: Work) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _compile(kernel: Any, grid: tuple[int, int, int], args: tuple, constants: tuple, options: dict[str, Any]) -> None:
    kernel.warmup(*args, *constants, grid=grid, **options)
