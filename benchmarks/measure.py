"""Tools of the kernels' benchmarks besides the clock: poisoned outputs, and checks of results."""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Failure, Line
from evalengine.bench.throughput import reason
from evalengine.bench.timing import compare_gpu_seconds
from evalengine.errors import EvalEngineError

Timer = Callable[[Mapping[str, Callable[[], Any]]], dict[str, float]]  # functions by name -> their median seconds

# Largest error of an element over (its magnitude + the tensor's root mean square): a few roundings of the dtype.
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}


class WrongResult(EvalEngineError):
    """A kernel's output is not what it should be: no time may be printed for it."""


def guarded(what: str, case: str, compare: Callable[[], Sequence[Line]]) -> Sequence[Line]:
    """The lines of a comparison, or a `Failure`: a case that breaks does not take the others' measurements with it."""
    try:
        return compare()
    except WrongResult as error:
        return [Failure(what, case, str(error))]
    except Exception as error:
        traceback.print_exc()
        return [Failure(what, case, reason(error), wrong=False)]


def compare_graphs(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median GPU seconds of each function by name, from a cold cache, taking turns, without the host's launch time.

    A function that cannot be captured is launched as it is: its time may hold the host's.
    """
    graphs = {name: capture(function) for name, function in functions.items()}
    for name, graph in graphs.items():
        if isinstance(graph, str):
            print(f"bench: {name} is timed without a CUDA graph: {graph}", file=sys.stderr)
    return compare_gpu_seconds(
        {name: functions[name] if isinstance(graph, str) else graph for name, graph in graphs.items()}
    )


def capture(function: Callable[[], Any]) -> Callable[[], None] | str:
    """The function as a CUDA graph to replay, or why it cannot be captured."""
    stream = torch.cuda.current_stream()
    try:
        return as_graph(function)
    except Exception as error:
        torch.cuda.set_stream(stream)  # a capture that breaks leaves its own stream behind
        return reason(error)


def run_poisoned(run: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """The outputs of `run`, whose memory held NaN (integers: -1) before.

    `run` goes once (which compiles) and its outputs are filled and given back; CUDA's allocator hands a freed block to
    the next request of its size, so an element that the second call does not write stays poisoned.
    """
    for output in run():
        output.fill_(torch.nan if output.is_floating_point() else -1)
    del output
    return list(run())


def check_close(name: str, result: Tensor, truth: Tensor, tolerance: float | None = None) -> None:
    """Raises WrongResult if an element of `result` is further from `truth` (float64) than its dtype's rounding allows.

    tolerance: of the error over (magnitude + root mean square), by default the dtype's in TOLERANCES.
    """
    assert result.shape == truth.shape, f"{name}: {list(result.shape)} against {list(truth.shape)}"
    limit = TOLERANCES[result.dtype] if tolerance is None else tolerance
    wide = truth.double()
    scale = wide.abs() + wide.square().mean().sqrt()
    error = ((result.double() - wide).abs() / scale).nan_to_num(nan=torch.inf).max().item()
    if not error <= limit:
        raise WrongResult(f"{name}: relative error {error:.2e}, at most {limit:.2e} is rounding")


def check_equal(name: str, result: Tensor, expected: Tensor) -> None:
    """Raises WrongResult unless the two tensors agree element by element."""
    if different := int((result != expected).sum()):
        raise WrongResult(f"{name}: {different} of {result.numel()} elements differ")


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the elements, each counted once."""
    return sum(t.numel() * t.element_size() for t in tensors)


def seeded(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def host_seconds(function: Callable[[], Any]) -> float:
    """Median time until one call returns, in seconds: what it costs the Python thread to launch. Needs an idle GPU."""
    for _ in range(3):
        function()
    times = []
    for _ in range(200):
        torch.cuda.synchronize()  # The queue must be empty: a full one would make the launch wait.
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)


def as_graph(function: Callable[[], Any]) -> Callable[[], None]:
    """The function's launches as one CUDA graph, which the result replays: its GPU time without the host's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()  # Compilation and allocation at first use must not be captured.
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
