"""`python -m evalengine bench`: every figure beside its comparison, measured in one run, and written down."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalengine.command import Parser
from evalengine.errors import ConfigError

if TYPE_CHECKING:
    from evalengine.bench.report import Line, Report

BENCHES = ("matmul", "attention", "rows", "forward")
MODELS = ("Qwen3-0.6B", "Qwen3-8B")
MATMUL_OPTIONS = {"--tune", "--shapes"}  # after `matmul` alone: a command of its own, without a report of lines
HELP = f"""\
usage: python -m evalengine bench [{"|".join(BENCHES)}|all ...] [--output FOLDER] [--models NAME,...]
       python -m evalengine bench matmul --tune|--shapes ... [...]
       python -m evalengine bench throughput [...]
       python -m evalengine bench host [...]
       python -m evalengine bench cache [setting=value ...] [...]
       python -m evalengine bench statistics [...]

Measures the kernels and whole forward steps on this machine's GPU, each beside its comparison in the same run, and
writes the lines to FOLDER (default results/reference) as JSON and as a Markdown table. Without a name: all.

  matmul      linear layers' shapes, beside cuBLAS and beside one fixed tile
  attention   decode beside copy bandwidth; prefill beside SDPA and flash-attn
  rows        norms, means, softmaxes, SiLU, RoPE, KV writes and sampling beside a copy of the same bytes
  forward     decode and prefill steps of {" and ".join(MODELS)} (--models: which), native beside fast
  throughput  whole runs of the engine, both modes, beside the least time possible: a command of its own, which `all`
              does not include (options: bench throughput --help)
  host        the host's share of such runs, on a CPU: likewise (options: bench host --help)
  cache       a run of which every answer is in the cache: likewise (options: bench cache --help)
  statistics  how often the statistics of gate and compare are wrong: a command of its own, without a GPU
  --tune      makes the table of matmul schedules instead; --shapes times some (options: bench matmul --tune --help)

Exit codes: 0 measured (a target that is missed is said in the table), 1 a result was wrong or a line could not be
measured, 2 bad usage or no GPU."""


def main(argv: Sequence[str]) -> int:
    """Runs `bench` with the words after it; returns the exit code."""
    if list(argv[:1]) == ["matmul"] and MATMUL_OPTIONS & {word.partition("=")[0] for word in argv}:
        return _matmul_command(list(argv[1:]))
    if list(argv[:1]) == ["statistics"]:
        from evalengine.bench import statistics_cli

        return statistics_cli.main(list(argv[1:]))
    if list(argv[:1]) == ["throughput"]:
        from evalengine.bench import throughput_cli

        return throughput_cli.main(list(argv[1:]))
    if list(argv[:1]) == ["cache"]:
        from evalengine.bench import cached

        return cached.main(list(argv[1:]))
    if list(argv[:1]) == ["host"]:
        from evalengine.bench import host

        return host.main(list(argv[1:]))
    arguments = _parse(argv)
    _need_gpu()
    return _run(arguments, ["python", "-m", "evalengine", "bench", *argv])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("bench", text=HELP)
    parser.add_argument("--output", type=Path, default=Path("results/reference"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    if unknown := [name for name in arguments.names if name not in (*BENCHES, "all")]:
        raise ConfigError(f"bench {unknown[0]}: there is no such benchmark; there are {', '.join(BENCHES)} and all")
    arguments.models = arguments.models.split(",")
    if unknown := [name for name in arguments.models if name not in MODELS]:
        raise ConfigError(f"bench --models {unknown[0]}: there are {', '.join(MODELS)}")
    chosen = arguments.names or ["all"]
    arguments.names = BENCHES if "all" in chosen else tuple(name for name in BENCHES if name in chosen)
    return arguments


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("bench measures a CUDA device, and this machine has none that can be used.")


def _matmul_command(argv: list[str]) -> int:
    from evalengine.bench import matmul

    return matmul.main(argv)


def _run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
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
    from evalengine.bench import forward
    from evalengine.bench.models import published_spec

    specs = {model: published_spec(model) for model in models}
    return forward.measure(device, collected.explanations, specs)
