"""`python -m benchmarks`: every figure with its comparison, measured in one run, and written down."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from evalengine.errors import ConfigError
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    from benchmarks.report import Line, Measurements

BENCHES = ("matmul", "experts", "packed", "attention", "cascade", "recurrent", "rows", "forward", "transformers")
MODELS = ("Qwen3-0.6B", "Qwen3-8B")


def main(arguments: Namespace) -> int:
    """Runs the benchmarks that were named; returns the exit code."""
    _need_gpu()
    return _run(arguments, ["python", "-m", "benchmarks", *arguments.argv])


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("the benchmarks measure a CUDA device, and this machine has none that can be used.")


def _run(arguments: Namespace, command: Sequence[str]) -> int:
    from benchmarks import report
    from evalengine.bench.environment import environment

    collected = report.Measurements()
    about = environment(command)
    for name in arguments.names:
        start = time.perf_counter()
        for line in _lines(name, arguments.models, collected):
            collected.lines.append(line)
            print("\n".join(report.table([line])[2:]), file=sys.stderr, flush=True)
        collected.explanations[f"{name}: seconds taken"] = round(time.perf_counter() - start, 1)
    stem = "speed" if arguments.names == BENCHES else f"speed-{'-'.join(arguments.names)}"
    files = report.write(collected, about, arguments.output, stem)
    print(report.markdown(collected, about))
    print("\n".join(str(file) for file in files))
    return 1 if collected.failures else 0


# Benchmarks of kernels that are timed in CUDA graphs, and their modules.
_KERNELS = {
    "experts": "expert_matmul", "attention": "attention", "cascade": "attention_cascade", "recurrent": "recurrent",
    "rows": "rows", "packed": "packed_matmul",
}  # fmt: skip


def _lines(name: str, models: Sequence[str], collected: Measurements) -> Iterator[Line]:
    """One benchmark's lines, as they are measured."""
    import torch

    from benchmarks.measure import compare_graphs

    device = torch.device("cuda", torch.cuda.current_device())
    if name == "matmul":
        from benchmarks import matmul

        return matmul.measure(device, collected.explanations)
    if name in _KERNELS:
        lines: Iterator[Line] = import_module(f"benchmarks.{_KERNELS[name]}").measure(compare_graphs, device)
        return lines
    if name == "transformers":
        from benchmarks import transformers_model

        return transformers_model.measure(device, models)
    from benchmarks import forward
    from benchmarks.models import published_spec

    specs = {model: published_spec(model) for model in models}
    return forward.measure(device, collected.explanations, specs)
