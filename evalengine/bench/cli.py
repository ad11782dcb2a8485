"""`python -m evalengine bench`: every figure beside its comparison, measured in one run, and written down."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evalengine.bench.names import BENCHES
from evalengine.errors import ConfigError
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    from evalengine.bench.report import Line, Report


def main(arguments: Namespace) -> int:
    """Runs the benchmarks that were named; returns the exit code."""
    _need_gpu()
    return _run(arguments, ["python", "-m", "evalengine", "bench", *arguments.argv])


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench measures a CUDA device, and this machine has none that can be used.")


def _run(arguments: Namespace, command: Sequence[str]) -> int:
    from evalengine.bench import report

    collected = report.Report()
    about = report.environment(command)
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


def _lines(name: str, models: Sequence[str], collected: Report) -> Iterator[Line]:
    """One benchmark's lines, as they are measured."""
    import torch

    from evalengine.bench.measure import compare_graphs

    device = torch.device("cuda", torch.cuda.current_device())
    if name == "matmul":
        from evalengine.bench import matmul

        return matmul.measure(device, collected.explanations)
    if name == "attention":
        from evalengine.bench import attention

        return attention.measure(compare_graphs, device)
    if name == "rows":
        from evalengine.bench import rows

        return rows.measure(compare_graphs, device)
    if name == "transformers":
        from evalengine.bench import transformers_model

        return transformers_model.measure(device, models)
    from evalengine.bench import forward
    from evalengine.bench.models import published_spec

    specs = {model: published_spec(model) for model in models}
    return forward.measure(device, collected.explanations, specs)
