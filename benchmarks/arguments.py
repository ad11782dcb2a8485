"""The arguments and options of `python -m benchmarks`, and of those benchmarks that are separate commands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from benchmarks.kernels_and_steps import BENCHES, MODELS
from evalengine.cli.command import Command, names
from evalengine.cli.commands import Files, Output, Requests
from evalengine.errors import ConfigError
from evalengine.util.command import Namespace

MATMUL_OPTIONS = {"--tune", "--shapes"}  # with one of these `benchmarks matmul` is a separate command
DRAWS, SEED = 1000, 0
Rounds = Annotated[int, Option(metavar="N", min=1, help="how often each is run")]
REFERENCE = Path("results/reference")
Benchmark = partial(Command, program="python -m")  # next to the package, and so not `python -m evalengine`


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks that the words name; returns the exit code."""
    if list(argv[:1]) == ["matmul"] and MATMUL_OPTIONS & {word.partition("=")[0] for word in argv}:
        return MATMUL(argv[1:])
    if argv and argv[0] in OWN:
        return OWN[argv[0]](argv[1:])
    return KERNELS_AND_STEPS(argv)


def _kernels_and_steps(
    words: Annotated[list[str] | None, Argument(metavar="[NAME ...]", show_default=False, help=f"{', '.join(BENCHES)} "
                     "or all (default: all)")] = None,
    output: Output = REFERENCE,
    models: Annotated[str, Option(metavar="NAME,...", help="of forward and transformers: which models' "
                     "shapes")] = ",".join(MODELS),
) -> Namespace:  # fmt: skip
    """Measures the kernels and whole forward steps on this machine's GPU, each next to its comparison in the same run.
    Writes the lines to a folder as JSON and as a Markdown table."""
    chosen = words or ["all"]
    if unknown := [name for name in chosen if name not in (*BENCHES, "all")]:
        there = ", ".join([*BENCHES, *OWN])
        raise ConfigError(f"benchmarks {unknown[0]}: there is no such benchmark; there are {there} and all")
    if unknown := [name for name in models.split(",") if name not in MODELS]:
        raise ConfigError(f"benchmarks --models {unknown[0]}: there are {', '.join(MODELS)}")
    measured = BENCHES if "all" in chosen else tuple(name for name in BENCHES if name in chosen)
    return Namespace(names=measured, models=models.split(","), output=output)


def _matmul(
    tune: Annotated[bool, Option("--tune", help="make the table of schedules")] = False,
    shapes: Annotated[str | None, Option(metavar="SHAPE;...", help="only these, as N,K or a part of a layer's name; "
                      "several with ';'")] = None,
    ranks: Annotated[int, Option(metavar="N", min=1, help="the shapes that one of N tensor-parallel ranks "
                     "has")] = 1,
    out: Annotated[Path | None, Option(metavar="FILE", help="the table, which is extended (default: the "
                   "package's)")] = None,
    report: Annotated[Path | None, Option(metavar="FILE", help="write every point's times here as JSON")] = None,
    budget_s: Annotated[float, Option(metavar="S", help="start no shape after so many seconds of tuning")] = 600,
    workers: Annotated[int, Option(metavar="N", help="processes that compile beforehand")] = 8,
) -> Namespace:  # fmt: skip
    """Times linear layers' shapes against cuBLAS and a fixed tile, or makes the table of matmul schedules."""
    return Namespace(**locals())


def _host(
    workloads: Annotated[Any, Option(metavar="NAME,...", parser=names, help="random, gsm8k_cot, or a "
                         "file's name (default: these two and all files)")] = None,
    files: Files = None, requests: Requests = None, rounds: Rounds = 3, output: Output = REFERENCE,
) -> Namespace:  # fmt: skip
    """Runs workloads of `evalengine bench throughput` through the engine over a model that computes nothing: what is
    left is scheduling, page tables, uploads and results, which a GPU hides as long as it takes longer itself. Needs no
    GPU; the quickest round counts."""
    return Namespace(**locals())


Settings = Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False, help="those of a "
                     "run: task=mmlu task.num_fewshot=5 model=smollm2-135m data_dir=FOLDER")]  # fmt: skip


def _cache(settings: Settings = None, rounds: Rounds = 3, output: Output = REFERENCE) -> Namespace:
    """Fills a cache with an answer to every request of a run, and times the run that reads them: a process from its
    start to its end, page and all. The answers are made up (nothing is computed, so the scores mean nothing): what is
    timed is reading, planning and writing. Needs no GPU; the median counts."""
    return Namespace(settings=settings or [], rounds=rounds, output=output)


def _harness(settings: Settings = None, rounds: Rounds = 3, output: Output = REFERENCE) -> Namespace:
    """Times a whole run, from the command to its end, against a process that has its engine alone answer the same
    requests: how much prompts, records, digest and page add."""
    return Namespace(settings=settings or [], rounds=rounds, output=output)


def _served(
    settings: Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False, help="of the "
                        "model and the engine: model=tinymath engine.max_num_seqs=256")] = None,
    requests: Annotated[int, Option(metavar="N", min=1, help="how many")] = 512,
    clients: Annotated[int, Option(metavar="N", min=1, help="connections, each of which sends one request after "
                       "another")] = 256,
    tokens: Annotated[int, Option(metavar="N", min=1, help="the most that an answer has")] = 64,
    logprobs: Annotated[bool, Option("--logprobs", help="ask for logprobs, and compare them, too")] = False,
    name: Annotated[str | None, Option(metavar="NAME", help="of the files: served-NAME-<cpu>")] = None,
    rounds: Rounds = 3, output: Output = REFERENCE,
) -> Namespace:  # fmt: skip
    """Has the server answer many clients over the loopback's sockets, against the engine that answers the same requests
    at once, and compares every answer. Linux."""
    return Namespace(**{**locals(), "settings": settings or []})


def _statistics(
    draws: Annotated[int, Option(metavar="N", help="of each simulated figure; figures without draws are counted over "
                     "all outcomes")] = DRAWS,
    seed: Annotated[int, Option(metavar="N", help="of all draws")] = SEED,
    output: Output = REFERENCE,
) -> Namespace:  # fmt: skip
    """Draws runs whose truth is known, and counts how often the statistics of gate and compare are wrong: false alarms,
    losses as large as the margin that pass, intervals that miss, losses that are seen. No GPU and no model; minutes."""
    if draws < 1 or seed < 0:
        raise ConfigError(f"benchmarks statistics: --draws {draws} --seed {seed}: 1 and 0 are the least")
    return Namespace(**locals())


def _push_gather(
    model: Annotated[str, Option(metavar="NAME", help=f"whose layers: {', '.join(MODELS)}")] = MODELS[-1],
    ranks: Annotated[int, Option(metavar="N", min=1, help="GPUs, a process each")] = 2,
    output: Output = REFERENCE,
) -> Namespace:  # fmt: skip
    """Times what the ranks of a tensor-parallel layer exchange: the batch-invariant mode's gathers by pushes into the
    other GPUs' memory and by NCCL, and the sums of the ordinary mode, for 1 to 8,192 tokens; also with the norms and
    the activation next to them, with which the mode gathers in one where the tokens are few."""
    if model not in MODELS:
        raise ConfigError(f"benchmarks push_gather --model {model}: there are {', '.join(MODELS)}")
    if ranks < 2:
        raise ConfigError(f"benchmarks push_gather --ranks {ranks}: one rank exchanges nothing; 2 are the least")
    return Namespace(**locals())


KERNELS_AND_STEPS = Benchmark("benchmarks", _kernels_and_steps, "benchmarks.kernels_and_steps:main", f"""\
  matmul      linear layers' shapes, compared with cuBLAS and with one fixed tile
  experts     tokens' products with their experts, against torch's grouped_mm and a copy of the bytes that they read
  packed      products that read packed weights, against the unpacked weight's and a copy of the bytes that they read
  attention   decode against copy bandwidth; prefill against SDPA and flash-attn
  cascade     decode of sequences on one prefix, read once, against reading it for each of them
  recurrent   gated delta rule and Mamba-2 against a copy of their states, by batches and by tokens; convolutions;
              fla-core's kernels, if installed
  rows        norms, means, softmaxes, SiLU, RoPE, KV writes and sampling against a copy of the same bytes
  forward     decode and prefill steps of {" and ".join(MODELS)} (--models: which), native against fast
  transformers  the same models' bodies in transformers, in the batch-invariant mode, against themselves out of it

Separate commands, which `all` does not include (each has its --help):
  host        the host's share of whole runs of the engine (python -m evalengine bench throughput), on a CPU
  cache       a run of which every answer is in the cache
  harness     a whole run against its engine alone
  served      the server's throughput and answers against its engine's
  statistics  how often the statistics of gate and compare are wrong
  push_gather what the ranks of a tensor-parallel layer exchange, over several GPUs
  matmul --tune|--shapes   makes the table of matmul schedules, or times some

Exit codes: 0 measured (the table marks missed targets), 1 a result was wrong or a line could not be
measured, 2 bad usage or no GPU.""")  # fmt: skip
MATMUL = Benchmark("benchmarks matmul", _matmul, "benchmarks.matmul:main", """\
Exit codes: 0 done, 1 a schedule gave other bytes or a shape could not be tuned, 2 bad usage or no GPU.""")  # fmt: skip
OWN = {
    "host": Benchmark("benchmarks host", _host, "benchmarks.host:main", """\
Prints a table and writes host-<cpu>.json and .md to the folder.

Exit codes: 0 measured, 2 bad usage."""),
    "cache": Benchmark("benchmarks cache", _cache, "benchmarks.cached:main", """\
Writes cache-<cpu>.json and .md to the folder.

Exit codes: 0 measured, 1 a run failed, 2 bad usage."""),
    "harness": Benchmark("benchmarks harness", _harness, "benchmarks.harness:main", """\
Writes harness-<gpu>.json and .md to the folder (harness-<cpu> without a GPU).

Exit codes: 0 measured, 1 a run failed, 2 bad usage."""),
    "served": Benchmark("benchmarks served", _served, "benchmarks.served:main", """\
Writes served-<gpu>.json and .md to the folder (served-<cpu> without a GPU).

Exit codes: 0 measured, 1 a process failed or an answer is not the engine's, 2 bad usage."""),
    "push_gather": Benchmark("benchmarks push_gather", _push_gather, "benchmarks.push_gather:main", """\
Writes push-gather-<ranks>-<gpu>.json and .md to the folder.

Exit codes: 0 measured, 1 a rank failed or pushes gave other bytes, 2 bad usage or too few GPUs."""),
    "statistics": Benchmark("benchmarks statistics", _statistics, "benchmarks.statistics_cli:main", """\
Writes statistics.md and .json to the folder.

Exit codes: 0 every claim holds (but for three standard errors of chance), 1 one does not, 2 bad usage."""),
}  # fmt: skip
