"""The arguments and options of `bench`: what a user measures on his own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from evalengine.bench.throughput_cli import THROUGHPUT_MODELS
from evalengine.cli.commands.words import BadUsage, Command, count, counts, names
from evalengine.util.command import Namespace

Output = Annotated[Path, Option(metavar="FOLDER", help="where the figures go, as JSON and Markdown")]
Files = Annotated[Path | None, Option(metavar="FOLDER", help="every FOLDER/<name>.jsonl.gz is a workload of token ids")]
Requests = Annotated[int | None, Option(metavar="N", parser=count, help="the first N requests of each workload")]


def _words(
    what: Annotated[str, Argument(metavar="throughput", show_default=False, help="what to measure")],
    models: Annotated[Any, Option(metavar="NAME,...", parser=names, help="model.path of each; a shape has dummy "
                      "weights")] = THROUGHPUT_MODELS,
    workloads: Annotated[Any, Option(metavar="NAME,...", parser=names, help="random, batch1, long, "
                         "gsm8k_cot, or a file's name (default: all of them)")] = None,
    files: Files = None,
    requests: Requests = None,
    rounds: Annotated[int, Option(metavar="N", parser=count, help="timed runs of each mode and workload (at least 3 "
                      "where one takes under 3 s)")] = 1,
    modes: Annotated[Any, Option(metavar="NAME,...", parser=names, help="invariant, fast (default: "
                     "both)")] = None,
    compare: Annotated[Path | None, Option(metavar="FILE", help="beside an earlier JSON, or another engine's with the "
                       "same keys")] = None,
    output: Output = Path("results/reference"),
    tensor_parallel_sizes: Annotated[Any, Option(metavar="N,...", parser=counts, help="every model once "
                                     'for each number of ranks (default: 1); "-tp2" is added to its name')] = None,
    max_num_seqs: Annotated[int, Option(metavar="N", parser=count, help="of the engines")] = 256,
    max_num_batched_tokens: Annotated[int, Option(metavar="N", parser=count, help="of the engines")] = 8192,
    max_model_len: Annotated[int | None, Option(metavar="N", parser=count, help="of the engines (default: what is "
                             "needed)")] = None,
    one_by_one: Annotated[bool, Option("--one-by-one", help="one mode after the other, even if both engines fit the "
                                       "memory")] = False,
    no_profile: Annotated[bool, Option("--no-profile", help="do not measure the GPU's busy share, which needs the "
                                       "first model's engines once more")] = False,
) -> Namespace:  # fmt: skip
    """Times whole runs of the engine at the token level, the batch-invariant mode beside the fast one, each from an
    empty prefix cache after a warm-up, and prints seconds, tokens or requests a second, the share of the floor's speed
    (the least time that two ceilings measured in the same run allow) and, with --compare, another engine's time."""
    arguments = Namespace(**locals())
    if what != "throughput":
        cure = "there is throughput; kernels, steps and statistics are measured from a checkout: python -m benchmarks"
        raise BadUsage(f"{what}: there is no such benchmark; {cure}")
    arguments.modes = modes or ["invariant", "fast"]
    arguments.tensor_parallel_sizes = tensor_parallel_sizes or [1]
    if unknown := [mode for mode in arguments.modes if mode not in ("invariant", "fast")]:
        raise BadUsage(f"--modes {unknown[0]}: there are invariant and fast")
    return arguments


main = Command("bench", _words, "evalengine.bench.throughput_cli:main", """\
Writes throughput-<gpu>.json and .md to the folder (throughput-<models>-<gpu> with --models) after every run; the JSON's
keys are in evalengine/bench/throughput.py.

Exit codes: 0 measured, 1 a run failed, or a round of the invariant mode gave other bytes, 2 bad usage.""")  # fmt: skip
