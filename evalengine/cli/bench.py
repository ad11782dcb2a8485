"""The arguments and options of `bench`: what a user measures on his own machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from evalengine.bench.throughput_cli import THROUGHPUT_MODELS
from evalengine.cli.command import BadUsage, Command, counts, names
from evalengine.util.command import Namespace

Output = Annotated[Path, Option(metavar="FOLDER", help="where the figures go, as JSON and Markdown")]
Files = Annotated[Path | None, Option(metavar="FOLDER", help="every FOLDER/<name>.jsonl.gz is a workload of token ids")]
Requests = Annotated[int | None, Option(metavar="N", min=1, help="the first N requests of each workload")]


def _words(
    what: Annotated[str, Argument(metavar="throughput", show_default=False, help="what to measure; of start there is "
                                  "a help of its own: bench start --help")],
    models: Annotated[Any, Option(metavar="NAME,...", parser=names, help="model.path of each; a shape has dummy "
                      "weights")] = THROUGHPUT_MODELS,
    workloads: Annotated[Any, Option(metavar="NAME,...", parser=names, help="random, batch1, long, "
                         "gsm8k_cot, or a file's name (default: all of them)")] = None,
    files: Files = None,
    requests: Requests = None,
    rounds: Annotated[int, Option(metavar="N", min=1, help="timed runs of each mode and workload (at least 3 "
                      "where one takes under 3 s)")] = 1,
    modes: Annotated[Any, Option(metavar="NAME,...", parser=names, help="invariant, fast (default: "
                     "both)")] = None,
    compare: Annotated[Path | None, Option(metavar="FILE", help="beside an earlier JSON, or another engine's with the "
                       "same keys")] = None,
    output: Output = Path("results/reference"),
    tensor_parallel_sizes: Annotated[Any, Option(metavar="N,...", parser=counts, help="every model once "
                                     'for each number of ranks (default: 1); "-tp2" is added to its name')] = None,
    max_num_seqs: Annotated[int, Option(metavar="N", min=1, help="of the engines")] = 256,
    max_num_batched_tokens: Annotated[int, Option(metavar="N", min=1, help="of the engines")] = 8192,
    max_model_len: Annotated[int | None, Option(metavar="N", min=1, help="of the engines (default: what is "
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
        others = "kernels, steps and statistics are measured from a checkout: python -m benchmarks"
        raise BadUsage(f"{what}: there is no such benchmark; there are throughput and start; {others}")
    arguments.modes = modes or ["invariant", "fast"]
    arguments.tensor_parallel_sizes = tensor_parallel_sizes or [1]
    if unknown := [mode for mode in arguments.modes if mode not in ("invariant", "fast")]:
        raise BadUsage(f"--modes {unknown[0]}: there are invariant and fast")
    return arguments


def _start(
    settings: Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False, help="those of "
                        "the run; without a task: task=mmlu limit=20")] = None,
    models: Annotated[Any, Option(metavar="NAME,...", parser=names, help="model.path of each; a shape has dummy "
                      "weights")] = THROUGHPUT_MODELS,
    tokenizer: Annotated[str, Option(metavar="PATH", help="a shape's tokenizer")] = "asset:tinymath",
    rounds: Annotated[int, Option(metavar="N", min=1, help="later commands of each model, after the first")] = 3,
    twice: Annotated[str, Option(metavar="SETTINGS", help="the run that is made twice in one process, with spaces "
                     "between its settings; '' for none")] = "task=hellaswag limit=1000",
    output: Output = Path("results/reference"),
) -> Namespace:  # fmt: skip
    """Times whole commands, from their start to their end, and says which phase takes how long: the first one with
    empty caches, as on a fresh machine, then later ones; and the first and second run of one process."""
    own = settings or []
    chosen = [*([] if any(word.startswith("task=") for word in own) else ["task=mmlu", "limit=20"]), *own]
    return Namespace(
        settings=chosen, models=models, tokenizer=tokenizer, rounds=rounds, twice=twice.split(), output=output
    )


class _Bench(Command):
    """`bench`, whose first word may name a benchmark with words of its own."""

    def __call__(self, argv: Sequence[str]) -> int:
        return START(argv[1:]) if list(argv[:1]) == ["start"] else super().__call__(argv)


main = _Bench("bench", _words, "evalengine.bench.throughput_cli:main", """\
Writes throughput-<gpu>.json and .md to the folder (throughput-<models>-<gpu> with --models) after every run; the JSON's
keys are in evalengine/bench/throughput.py.

Exit codes: 0 measured, 1 a run failed, or a round of the invariant mode gave other bytes, 2 bad usage.""")  # fmt: skip
START = Command("bench start", _start, "evalengine.bench.start:main", """\
  bench start data_dir=FOLDER --models shape:qwen3-0.6b
  bench start task=gsm8k limit=20 --models ./checkpoint --twice ''

Writes start-<gpu>.json and .md to the folder; the JSON's keys are in evalengine/bench/start.py.

Exit codes: 0 measured, 1 a command failed, or two commands' digests differ, 2 bad usage.""")  # fmt: skip
