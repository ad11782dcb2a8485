"""`python -m evalengine bench throughput`: its work. Torch is imported once they are good."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evalengine.certify.model import SHAPE
from evalengine.errors import ConfigError, readable
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    from evalengine.bench.throughput import Measured
    from evalengine.bench.throughput_compare import Others
    from evalengine.bench.timed_engine import Preset, Row, ThroughputPlan

THROUGHPUT_MODELS = "shape:qwen3-0.6b,shape:qwen3-8b"  # as --models takes them
LEAST_MODEL_LEN = 4096  # tokens that the engine is set up for at least, if the model takes as many
PATH_OPTIONS = ("--files", "--output", "--compare")


def main(arguments: Namespace) -> int:
    """Measures whole runs as the words say; returns the exit code."""
    from evalengine.bench import throughput, throughput_report
    from evalengine.bench.environment import environment
    from evalengine.bench.throughput_compare import read_others

    with readable(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    others = read_others(arguments.compare) if arguments.compare else []
    plan = _plan(arguments)
    for preset in plan.presets:
        throughput.check_plan(preset, plan)
    gc.freeze()  # The collector would otherwise walk all workloads' token lists during each run.
    about = environment(["python", "-m", "evalengine", "bench", *_without_folders(arguments.argv)])
    measured = throughput.Measured(about, _settings(arguments))
    name = record_name(arguments.models, arguments.tensor_parallel_sizes)

    def save(row: Row | None) -> None:
        if row is not None:
            seconds, rate = f"{row['wall_s']:.3f} s", throughput_report.rate(row, row["wall_s"])
            words = (row["preset"], row["workload"], row["mode"], seconds, rate)
            print(f"bench: {', '.join(words)}", file=sys.stderr, flush=True)
        throughput_report.write(measured, others, arguments.output, name)

    throughput.measure(plan, measured, save)
    _print(measured, others, throughput_report.write(measured, others, arguments.output, name))
    return 1 if measured.failures or throughput_report.differing_digests(measured.rows) else 0


def record_name(models: Sequence[str], sizes: Sequence[int]) -> str:
    """The name of a run's file: anything but the default models on one GPU each never replaces their record."""
    from evalengine.bench.environment import slug

    if [*models] == THROUGHPUT_MODELS.split(",") and [*sizes] == [1]:
        return "throughput"
    ranks = "" if [*sizes] == [1] else f"-tp{'-'.join(map(str, sizes))}"
    return f"throughput-{slug('-'.join(map(_model_name, models)))}{ranks}"


def _model_name(path: str) -> str:
    return path.removeprefix(SHAPE) if path.startswith(SHAPE) else path.rstrip("/").rpartition("/")[2]


def _plan(arguments: Namespace) -> ThroughputPlan:
    """Every model and workload, found and checked before the first is measured."""
    from evalengine.bench.timed_engine import ThroughputPlan
    from evalengine.bench.workload_files import workload_files
    from evalengine.bench.workloads import IN_CODE

    files = workload_files(arguments.files) if arguments.files else {}
    workload_names = list(dict.fromkeys((*IN_CODE, *files)))
    chosen = arguments.workloads or workload_names
    if unknown := [name for name in chosen if name not in workload_names]:
        fix = f"there are {', '.join(workload_names)}" + ("" if files else "; --files FOLDER adds a folder's")
        raise ConfigError(f"--workloads {unknown[0]}: there is no such workload; {fix}")
    alone = [_preset(path, chosen, files, arguments) for path in arguments.models]
    presets = [_shared(preset, ranks) for preset in alone for ranks in arguments.tensor_parallel_sizes]
    return ThroughputPlan(
        presets,
        modes=arguments.modes,
        rounds=arguments.rounds,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        one_by_one=arguments.one_by_one,
        profile=not arguments.no_profile,
    )


def _preset(path: str, chosen: Sequence[str], files: dict[str, Path], arguments: Namespace) -> Preset:
    from evalengine.bench.timed_engine import Preset
    from evalengine.bench.workloads import make_workload, num_tokens
    from evalengine.certify.model import open_checkpoint
    from evalengine.config.schema import ModelConfig

    name = _model_name(path)
    checkpoint = open_checkpoint(ModelConfig(name=name, path=path))
    limit = checkpoint.spec.max_position_embeddings
    if (requested := arguments.max_model_len) is not None:
        if not 1 < requested <= limit:
            raise ConfigError(f"--max-model-len {requested}: must be in 2 ... {limit} for {path}")
        limit = requested
    vocab_size = checkpoint.spec.vocab_size
    workloads = [make_workload(w, files, name, vocab_size, limit, arguments.requests) for w in chosen]
    longest = max(num_tokens(r) for w in workloads for r in (*w.requests, *w.warm_up))
    return Preset(name, checkpoint, requested or min(limit, max(LEAST_MODEL_LEN, longest)), workloads)


def _shared(preset: Preset, ranks: int) -> Preset:
    from evalengine.bench.timed_engine import rank_suffix

    return replace(preset, ranks=ranks, name=preset.name + rank_suffix(ranks))


def _settings(arguments: Namespace) -> dict[str, object]:
    names = ("rounds", "requests", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_sizes")
    return {name: getattr(arguments, name) for name in names}


def _without_folders(argv: Sequence[str]) -> list[str]:
    """The arguments with every path cut to its last part, so that a published command names no user's folders."""
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if words and words[-1] in PATH_OPTIONS:
            word = Path(word).name
        elif option in PATH_OPTIONS and equals:
            word = f"{option}={Path(value).name}"
        elif "/" in word:
            word = ",".join(part.rstrip("/").rpartition("/")[2] for part in word.split(","))
        words.append(word)
    return words


def _print(measured: Measured, others: Sequence[Others], files: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.text import Text

    from evalengine.bench.throughput_report import notes, sheet
    from evalengine.util.tables import print_sheet

    console = Console(file=sys.stdout)
    print_sheet(sheet(measured.rows, others), console)
    for line in (*notes(measured, others), *map(str, files)):
        console.print(Text(line), soft_wrap=True)
