"""The sub-commands' arguments, options and help. The module that does a command's work is imported after parsing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, BadParameter, Option, TyperException

from evalengine.cli.command import SETTING, Command, counts, names, setting_of
from evalengine.util.command import Namespace
from evalengine.util.plugins import load

AXES = (
    *("batch", "order", "neighbours", "chunks", "prefix", "preemption", "pages", "decode", "asked", "ids", "nan"),
    *("threads", "graphs", "cascade", "speculation", "tensor_parallel", "busy", "mixed", "restart"),
)
UNITS = {"h": 3600, "d": 86_400, "w": 7 * 86_400, "MB": 10**6, "GB": 10**9}  # in seconds or bytes
NUMERIC = ("batch_invariant=", "numerics=", "engine.", "model.")  # settings that change how numbers are computed
PLACES = ("data_dir=", "model.", "tasks.", "engine.device=", "engine.num_kv_blocks=", "engine.num_threads=")
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {}  # name -> a function of the words after the name


def _command(work: str, kind: type[Command] = Command) -> Callable[[Callable[..., Namespace | None]], Command]:
    """Make a command of a function that declares its words. work: the "module:function" that does the work."""

    def declare(words: Callable[..., Namespace | None]) -> Command:
        COMMANDS[words.__name__] = command = kind(words.__name__, words, work)
        return command

    return declare


def _limit(text: str) -> tuple[str, int]:
    """(name, seconds or bytes) of `older-than=30d` or `size=2GB`."""
    match = re.fullmatch(r"(older-than(?==\d+[hdw]$)|size(?==\d+[MG]B$))=(\d{1,9})(\w+)", text)
    if match is None:
        raise BadParameter(f"{text}: must be older-than=30d (h, d, w) or size=2GB (MB, GB)")
    return match[1], int(match[2]) * UNITS[match[3]]


Json = Annotated[str | None, Option(metavar="FILE", help="write the findings as JSON; - for standard output")]
Html = Annotated[Path | None, Option(metavar="FILE", help="write the findings as a self-contained page")]
Allow = Annotated[bool, Option("--allow", help="compare unlike runs on the requests that they share")]
Places = Annotated[list[str] | None, Option("--with", metavar="SETTING=VALUE ...", parser=setting_of(*PLACES), help=
                   "where rows and weights are here (data_dir, model.path, tasks.*), engine.device, "
                   "engine.num_kv_blocks, engine.num_threads")]  # fmt: skip
Output = Annotated[Path, Option(metavar="FOLDER", help="where the figures go, as JSON and Markdown")]
Files = Annotated[Path | None, Option(metavar="FOLDER", help="every FOLDER/<name>.jsonl.gz is a workload of token ids")]
Requests = Annotated[int | None, Option(metavar="N", min=1, help="the first N requests of each workload")]
Models = Annotated[Any, Option(metavar="NAME,...", parser=names, help="model.path of each; a shape has dummy weights")]
SHAPES = "shape:qwen3-0.6b,shape:qwen3-8b"  # bench.throughput_cli.THROUGHPUT_MODELS, which takes long to import


@_command("evalengine.report.cli.compare:main")
def compare(
    runs: Annotated[list[str], Argument(metavar="RUN", help="a run folder, an experiment's folder (its runs), an "
                    "lm-eval output folder or a baseline; or one folder of runs, such as a sweep's output_dir")],
    level: Annotated[Literal["bitwise", "tokens", "answers"] | None, Option(help="what must be the same for exit code "
                     "0: every bit (default), every output token, or every answer and 0/1 score")] = None,
    allow: Allow = False,
    json: Json = None,
    html: Html = None,
    matrix: Annotated[bool, Option("--matrix", help="a table of all pairs (always so for more than two runs)")] = False,
    models: Annotated[bool, Option("--models", help="compare as models whatever the weights are")] = False,
    as_runs: Annotated[bool, Option("--runs", help="compare as runs, which must be the same")] = False,
    output: Annotated[list[str] | None, Option("-o", "--output", metavar="FILE", help="of models: write the tables "
                      "there: .md, .tex, .csv or .html, or the curve over checkpoints: .svg; may be given several "
                      "times")] = None,
    format: Annotated[Literal["csv", "latex", "markdown"] | None, Option(help="of models: print only tables")] = None,
    names: Annotated[str | None, Option(metavar="A,B,...", help="the models' names, in their order")] = None,
    by: Annotated[str | None, Option(metavar="FIELD", help="of models: split tasks by this field (subject)")] = None,
    history: Annotated[bool, Option("--history", help="checkpoints of one training: in the order of the steps in their "
                                    "names, else as given; pages show the curve")] = False,
) -> None:  # fmt: skip
    """Say whether runs are the same; if not, where they differ, why, and whether it matters.

    Runs whose weights differ are compared as models, document by document: metrics with intervals, ranks, paired tests.
    No --allow is needed: documents are paired by hash, and prompts may differ.

    Exit codes: 0 the same at --level, or a comparison of models that an option requests; 1 different, as models with
    other weights are; 2 not comparable or bad usage."""
    if models and as_runs:
        raise TyperException("--models and --runs contradict each other: give one of them")


@_command("evalengine.report.cli.report:baseline")
def baseline(
    run: Annotated[str | None, Argument(metavar="RUN", help="a finished run's or an lm-eval output folder")] = None,
    output: Annotated[str | None, Option("-o", "--output", metavar="FILE.json", help="the file to write")] = None,
    force: Annotated[bool, Option("--force", help="replace that file if it exists")] = False,
) -> None:  # fmt: skip
    """Write the run's digests, scores and manifest as one small file (0.2 MB for gsm8k) that can be committed, for
    `compare FILE RUN` and `gate FILE RUN`.

    Exit codes: 0 written, 1 the file cannot be written, 2 bad usage, or RUN is unfinished, damaged or edited."""
    if not run or not output:
        raise TyperException("give a run and -o FILE.json")


class _Gate(Command):
    """`gate BASELINE -- SETTINGS`: the words after the two dashes are settings of the run, not options of the gate."""

    def parse(self, argv: Sequence[str]) -> Any:
        dashes = list(argv).index("--") if "--" in argv else None
        arguments = super().parse(argv[:dashes])
        if arguments is None:
            return None
        arguments.settings = None if dashes is None else list(argv[dashes + 1 :])
        if (arguments.run is None) != (dashes is not None):
            raise self.bad_usage("give RUN, or -- and the settings of a run to make; not both")
        if dashes is None and (given := [name for name in ("keep", "step", "bootstrap") if getattr(arguments, name)]):
            raise self.bad_usage(f"--{given[0]} is for a run that the gate makes: gate BASELINE -- SETTINGS")
        return arguments


@_command("evalengine.report.cli.gate:main", _Gate)
def gate(
    baseline: Annotated[str, Argument(metavar="BASELINE", help="a run's folder, or a file of `baseline`")],
    annotations: Annotated[bool, Option(default_factory=lambda: os.environ.get("GITHUB_ACTIONS") == "true",
                                        show_default=False, help="::error lines for GitHub (default: where "
                                        "GITHUB_ACTIONS=true)")],
    run: Annotated[str | None, Argument(metavar="RUN", help="the run that is judged; or a folder of runs, such as a "
                   "sweep's, each of which is judged; or -- and the settings of a run to make")] = None,
    policy: Annotated[str, Option(metavar="NAME|FILE", help="bitwise, tokens, accuracy, or a file")] = "bitwise",
    base: Annotated[str | None, Option(metavar="REVISION", help="take BASELINE from this git revision (origin/main), "
                                       "and report whether it has changed here")] = None,
    keep: Annotated[Path | None, Option(metavar="FOLDER", help="keep the run of `-- SETTINGS` in this folder")] = None,
    step: Annotated[int | None, Option(metavar="N", min=1, help="with `-- SETTINGS`: compute N documents of each task "
                                       "at a time, in a random order, and stop once it is decided")] = None,
    noise: Annotated[str | None, Option(metavar="RUN", help="of a baseline in fast mode: a run of its configuration "
                                        "under another schedule, whose flips are compared with RUN's")] = None,
    bootstrap: Annotated[Path | None, Option(metavar="FILE", help="where there is no baseline yet, make the run of "
                                             "`-- SETTINGS` and write it as FILE, to commit")] = None,
    junit: Annotated[Path | None, Option(metavar="FILE", help="JUnit XML")] = None,
    summary: Annotated[Path | None, Option(metavar="FILE", envvar="GITHUB_STEP_SUMMARY", help="add Markdown")] = None,
    json: Json = None,
    html: Html = None,
    risk: Annotated[bool, Option("--risk", help="also print P(loss > margin) of each check")] = False,
    verbose: Annotated[bool, Option("--verbose", help="print all that each check saw")] = False,
) -> None:  # fmt: skip
    """Judge RUN against BASELINE: may this change be merged?

    Policies: bitwise   every bit as in the baseline: for changes that mean to touch no arithmetic
              tokens    the same tokens, logprobs within epsilon
              accuracy  no metric worse by more than a margin (non-inferiority)
              FILE      your own, which may say `extends: accuracy`; conf/gate/accuracy.yaml shows every setting

    `gate BASELINE -- SETTINGS` makes the run first, as `python -m evalengine SETTINGS` would, in a new folder.
    `gate BASELINE SWEEP` judges each run of an experiment or of a folder of runs; the worst verdict counts.

    Exit codes: 0 the policy holds, 1 it does not, 2 not comparable, no baseline, bad policy or bad usage, 3
    inconclusive: nothing failed, but a check could not see the loss that the policy names (`inconclusive: fail` or
    `pass` in the policy make that 1 or 0)."""


@_command("evalengine.report.cli.report:main")
def report(
    runs: Annotated[list[str], Argument(metavar="RUN", help="a run folder, an experiment's folder (its runs), an "
                    "lm-eval output folder, or the folder that contains runs; of several also baselines")],
    output: Annotated[str | None, Option("-o", "--output", metavar="FILE", help="the page's file (one run: report.html "
                      "in its folder; several: comparison.html here; a folder of runs: index.html in it), or the "
                      "table's")] = None,
    allow: Allow = False,
    table: Annotated[Literal["md", "latex"] | None, Option(help="a table in Markdown or LaTeX (booktabs): tasks as "
                     "rows, runs as columns; to standard output, or to -o")] = None,
    model_index: Annotated[str | None, Option(metavar="FILE", help="a run as a model card's `model-index`")] = None,
    samples: Annotated[str | None, Option(metavar="FILE", help="a run's samples as CSV: a row for each task, document "
                       "and filter, with prompts, responses, answers and scores")] = None,
    inspect_log: Annotated[str | None, Option(metavar="FILE", help="a run as inspect_ai logs, one per task")] = None,
    eval_results: Annotated[str | None, Option(metavar="FILE", help="a run as YAML for a model's .eval_results/ on the "
                            "Hub, which shows it on the dataset's leaderboard")] = None,
    every_eval: Annotated[str | None, Option(metavar="FOLDER", help="a run as Every Eval Ever's records: all "
                          "results, and each sample; in the layout of its datastore")] = None,
    log_to: Annotated[str | None, Option(metavar="TRACKER", help="log each run to wandb or mlflow")] = None,
) -> None:  # fmt: skip
    """Write one self-contained HTML file: of one run all its results, of several their comparison (of different models:
    which is better), of a folder of runs the list of them.

    The other options write what they name instead, several in one call; the page then needs -o. Nothing is written
    unless every path is valid.

    Exit codes: 0 written, 1 a file cannot be written, 2 a run cannot be read or compared, or bad usage."""


@_command("evalengine.explain.cli:main")
def explain(
    sources: Annotated[list[str], Argument(metavar="RUN", help="a run's folder, or a file of --write")],
    item: Annotated[str | None, Option(metavar="ITEM", help="DOC, or TASK/DOC, TASK/DOC/REQUEST, "
                    "TASK/DOC/REQUEST/REPEAT (default, for two runs: the first that differs)")] = None,
    against: Annotated[list[str] | None, Option(metavar="SETTING=VALUE ...", parser=setting_of(*NUMERIC),
                       help="compare RUN with itself under other settings: batch_invariant, numerics, engine.*, "
                       "model.*")] = None,
    write: Annotated[Path | None, Option(metavar="FILE", help="write RUN's outputs, for another machine")] = None,
    values: Annotated[list[int] | None, Option(metavar="TOKEN ...", help="with --write: tokens whose outputs go in, "
                      "in addition to digests (default: the prompt's last)")] = None,
    places: Places = None,
    alone: Annotated[bool, Option("--alone", help="run the item without the requests of its batches")] = False,
    json: Json = None,
) -> None:  # fmt: skip
    """Run one item again as two runs did, compare the output of every op by bytes, and name the first that differs. A
    RUN is a run's folder, or a FILE that another machine wrote with --write.

      explain A B --item 3                       two runs on this machine
      explain A --item 3 --against batch_invariant=false
      explain A --item 3 --write a.json          on each machine; then, on either: explain a.json b.json

    Exit codes: 0 no output differs, 1 one does, 2 not comparable or bad usage."""
    if len(sources) != (1 if write or against else 2):
        raise TyperException("give two RUNs; or one with --against SETTING=VALUE, or with --write FILE")
    if write and (against or json):
        raise TyperException("--write only writes; give --against and --json to the comparison")
    if values and not write:
        raise TyperException("--values is for --write: on one machine every output is at hand")


@_command("evalengine.certify.cli:main")
def verify(
    words: Annotated[list[str] | None, Argument(metavar="[engine|kernels] [setting=value ...]", show_default=False,
                     help="what to certify (default: both), and settings as of a run")] = None,
    axes: Annotated[list[str] | None, Option(metavar="AXIS ...", help="what to vary (default: all of "
                    f"{' '.join(AXES)})")] = None,
    logprobs: Annotated[int | None, Option(metavar="N", min=0, help="compare at least N (axis mixed)")] = None,
    quick: Annotated[bool, Option("--quick", help="few and short requests: a minute less")] = False,
    layers: Annotated[int | None, Option(metavar="N", help="reduce a shape's depth to N")] = None,
    no_cache: Annotated[bool, Option("--no-cache", help="ignore the cached verdict on native's schedules")] = False,
    out: Annotated[Path | None, Option(metavar="FILE.json", help="where the certificate goes, as "
                   "JSON and as Markdown (default: results/certificates/<tasks>-<model>-<time>.json)")] = None,
) -> Namespace:  # fmt: skip
    """Certify this installation, in under three minutes on a CPU: `engine`, `kernels`, or both by default.

      engine     runs the same requests under many schedules and compares bytes with each request alone, then does the
                 same in the ordinary mode (batch_invariant=false), which must differ or the comparison proves nothing
      kernels    compares exact's kernels with the bits that every machine must give; on CUDA also every schedule that
                 native's may choose for this model with the reference schedule

    Settings are those of a run: task=gsm8k model=qwen3-0.6b, model.path=FOLDER, limit=, engine.device=, engine.dtype=,
    numerics=, data_dir=, ... The requests are those of the tasks' first documents (limit=: how many; answers are
    truncated to 24 tokens on a CPU and 256 on a GPU, unless task.generation.max_gen_toks= is set) and others whose
    lengths lie on both sides of every page and chunk border. model.path=shape:qwen3-0.6b or shape:qwen3-8b is that
    model's shape with dummy weights, and takes no task.

    Exit codes: 0 identical, 1 differing, incomplete or failed, 2 bad usage."""
    arguments = Namespace(**locals())
    arguments.settings = tuple(word for word in words or () if SETTING.match(word))
    parts = [word for word in words or () if not SETTING.match(word)]
    arguments.what = what = parts[0] if parts else None
    if what not in (None, "engine", "kernels"):
        raise TyperException(f"{what}: there are engine and kernels")
    if parts[1:]:
        raise TyperException(f"{' '.join(parts[1:])}: name one part, or none for both")
    engine_only = [name for name in ("axes", "logprobs", "quick", "out") if getattr(arguments, name)]
    if what == "kernels" and engine_only:
        raise TyperException(f"--{engine_only[0]}: belongs to verify engine; verify kernels runs no requests")
    if out is not None and (out.suffix != ".json" or out.is_dir()):
        raise TyperException(f"--out {out}: name a file that ends in .json; the Markdown is written next to it")
    arguments.axes = axes or AXES
    if unknown := [axis for axis in arguments.axes if axis not in AXES]:
        raise TyperException(f"--axes: {unknown[0]!r} is not one of {', '.join(AXES)}")
    if logprobs is not None and "mixed" not in arguments.axes:
        raise TyperException(f"--logprobs={logprobs}: only the axis mixed takes more of them; add it to --axes")
    return arguments


class _Bench(Command):
    """`bench`, whose first word may name a benchmark that has its own options."""

    def __call__(self, argv: Sequence[str]) -> int:
        return START(argv[1:]) if list(argv[:1]) == ["start"] else super().__call__(argv)


@_command("evalengine.bench.throughput_cli:main", _Bench)
def bench(
    what: Annotated[str, Argument(metavar="throughput", show_default=False, help="what to measure; the other benchmark "
                                  "is start: bench start --help")],
    models: Models = SHAPES,
    workloads: Annotated[Any, Option(metavar="NAME,...", parser=names, help="random, batch1, long, "
                         "gsm8k_cot, or a file's name (default: all of them)")] = None,
    files: Files = None,
    requests: Requests = None,
    rounds: Annotated[int, Option(metavar="N", min=1, help="timed runs per mode and workload (3 if under 3 s)")] = 1,
    modes: Annotated[Any, Option(metavar="NAME,...", parser=names, help="what to time")] = "invariant,fast",
    compare: Annotated[Path | None, Option(metavar="FILE", help="compare with a JSON of bench, or like it")] = None,
    output: Output = Path("results/reference"),
    tensor_parallel_sizes: Annotated[Any, Option(metavar="N,...", parser=counts, help="every model once "
                                     'for each number of ranks; "-tp2" is added to its name')] = "1",
    max_num_seqs: Annotated[int, Option(metavar="N", min=1, help="of the engines")] = 256,
    max_num_batched_tokens: Annotated[int, Option(metavar="N", min=1, help="of the engines")] = 8192,
    max_model_len: Annotated[int | None, Option(metavar="N", min=1, help="of the engines (as needed)")] = None,
    one_by_one: Annotated[bool, Option("--one-by-one", help="never load the engines of both modes")] = False,
    no_profile: Annotated[bool, Option("--no-profile", help="do not measure the GPU's busy share")] = False,
) -> Namespace:  # fmt: skip
    """Time end-to-end runs of the engine at the token level, in the batch-invariant mode and the fast one, each from an
    empty prefix cache after a warm-up. Prints seconds, tokens or requests per second, the share of the floor's speed
    (the least time that two ceilings measured in the same run allow) and, with --compare, another engine's time.

    Writes throughput-<gpu>.json and .md to the folder (throughput-<models>-<gpu> with --models) after every run; the
    JSON's keys are in evalengine/bench/throughput.py.

    Exit codes: 0 measured, 1 a run failed, or a round of the invariant mode gave other bytes, 2 bad usage."""
    arguments = Namespace(**locals())
    if what != "throughput":
        others = "kernels, steps and statistics are measured from a checkout: python -m benchmarks"
        raise TyperException(f"{what}: there is no such benchmark; there are throughput and start; {others}")
    if unknown := [mode for mode in modes if mode not in ("invariant", "fast")]:
        raise TyperException(f"--modes {unknown[0]}: there are invariant and fast")
    return arguments


def _start(
    settings: Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False, help="those of "
                        "the run; without a task: task=mmlu limit=20")] = None,
    models: Models = SHAPES,
    tokenizer: Annotated[str, Option(metavar="PATH", help="a shape's tokenizer")] = "asset:tinymath",
    rounds: Annotated[int, Option(metavar="N", min=1, help="later commands of each model, after the first")] = 3,
    twice: Annotated[str, Option(metavar="SETTINGS", help="the run that is made twice in one process, with spaces "
                     "between its settings; '' for none")] = "task=hellaswag limit=1000",
    output: Output = Path("results/reference"),
) -> Namespace:  # fmt: skip
    """Time full commands, from their start to their end, and each phase of them: the first one with empty caches, as on
    a fresh machine, then later ones; and the first and second run of one process.

      bench start data_dir=FOLDER --models shape:qwen3-0.6b
      bench start task=gsm8k limit=20 --models ./checkpoint --twice ''

    Writes start-<gpu>.json and .md to the folder; the JSON's keys are in evalengine/bench/start.py.

    Exit codes: 0 measured, 1 a command failed, or two commands' digests differ, 2 bad usage."""
    arguments, chosen = Namespace(**locals()), settings or []
    has_task = any(word.startswith("task=") for word in chosen)
    arguments.settings = chosen if has_task else ["task=mmlu", "limit=20", *chosen]
    arguments.twice = twice.split()
    return arguments


START = Command("bench start", _start, "evalengine.bench.start:main")


@_command("evalengine.cache.cli:main")
def cache(
    folder: Annotated[str, Argument(metavar="FOLDER", help="the folder that runs name by cache=FOLDER")],
    prune: Annotated[list[str] | None, Option(metavar="LIMIT", parser=_limit, help="older-than=30d, size=2GB")] = None,
) -> None:  # fmt: skip
    """List what a cache of answers (cache=FOLDER of a run) contains, by model; --prune makes it smaller.

      cache ~/answers                          what it contains
      cache ~/answers --prune older-than=30d   without what was written more than 30 days ago (h, d, w)
      cache ~/answers --prune size=2GB         without the oldest answers beyond that size (MB, GB)

    Exit codes: 0 done, 1 the cache cannot be read or written, 2 bad usage."""


@_command("evalengine.receipts.cli:prove")
def prove(
    run: Annotated[str, Argument(metavar="RUN", help="a run's folder, or latest")],
    item: Annotated[str, Option(metavar="ITEM", help="DOC, or TASK/DOC, TASK/DOC/REQUEST, TASK/DOC/REQUEST/REPEAT")],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="the receipt")],
    places: Places = None,
) -> None:
    """Write one item of a run as a receipt: prompt and output ids, logprobs, the path from them to the run's digest,
    and what computed them. `check` computes the item again from it, on any machine for a run in exact.

      prove latest --item 3 -o receipt.json
      prove results/RUN --item gsm8k/7 -o receipt.json --with data_dir=/data

    Exit codes: 0 written, 1 the file cannot be written, 2 no such item, a run that cannot be proved, or bad usage."""


@_command("evalengine.receipts.cli:check")
def check(
    source: Annotated[str, Argument(metavar="RECEIPT|RUN", help="a receipt; or a run's folder, or latest")],
    model: Annotated[str | None, Option(metavar="PATH", help="of a receipt: a folder, Hub id or .gguf file")] = None,
    tokenizer: Annotated[str | None, Option(metavar="PATH", help="where it is not next to the weights")] = None,
    adapter: Annotated[str | None, Option(metavar="PATH", help="of a receipt: the LoRA adapter of its run")] = None,
    digest: Annotated[str | None, Option(metavar="HEX", help="the digest that the receipt's run must have")] = None,
    device: Annotated[str, Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N")] = "auto",
    sample: Annotated[int, Option(metavar="N", min=1, help="of a run: how many items")] = 20,
    seed: Annotated[int, Option(metavar="N", help="of a run: which items")] = 0,
    places: Places = None,
) -> None:
    """Compute again a receipt's item (`prove` writes one), or a seeded sample of a run's items, and say whether every
    bit agrees: tokens, logprobs, text. What ran in exact can be checked on any machine.

      check receipt.json --model ./checkpoint --digest 28bdce46...   the digest that the run published
      check latest --sample 20

    Exit codes: 0 every bit agrees, 1 something differs, 2 it cannot be checked with this model or machine, or bad
    usage."""


@_command("evalengine.cli.plan:main")
def plan(
    words: Annotated[list[str], Argument(metavar="task=NAME [policy=NAME] [runs=RUN,RUN] [flips=2%] [margin=POINTS] "
                     "[margin_percent=PERCENT] [alpha=0.05] [power=0.8]", show_default=False, help="one task, a group, "
                     "or several with commas; the gate's policy, a name or a file (accuracy); runs or baseline files, "
                     "whose documents, clusters and differences are used; the share of answers that change without a "
                     "reason; the policy's limits, if others than its own")],
) -> None:  # fmt: skip
    """Show how many documents each check of a gate needs, and how likely the gate passes with those that there are.

    With so many documents all checks of the policy pass with probability `power`, if nothing is lost. The checks count
    as independent: those that share documents pass together more often. Time is by the newest finished run of the task
    in results/.

      plan task=gsm8k,arc_easy margin=1
      plan task=gsm8k,drop policy=own.yaml runs=baseline.json   a policy's checks; drop's passages as in the baseline
      plan task=wikitext runs=RUN,RUN                           perplexities need two runs, which show their differences
      plan task=gsm8k runs=noise_floor-gsm8k-...                how many answers change by the schedule alone
      plan task=gsm8k runs=latest                               of task.repeats=8: the effect of more samples

    Exit codes: 0 shown, 2 bad usage."""


@_command("evalengine.integrations.openai_server.cli:main")
def serve(
    words: Annotated[list[str] | None, Argument(metavar="setting=value", show_default=False, help="the model, the "
                     "engine and the server: model=tinymath port=8000")] = None,
    api_key: Annotated[str | None, Option(envvar="EVALENGINE_API_KEY", metavar="KEY", show_envvar=False, help="what "
                       "clients must send; better by the variable EVALENGINE_API_KEY, as a command line can be "
                       "seen")] = None,
) -> None:  # fmt: skip
    """Serve a model by OpenAI's HTTP interface, in batches: the same request has the same bytes, whatever else is
    requested meanwhile.

      serve model=tinymath                      http://127.0.0.1:8000/v1: models, completions, chat/completions
      serve model.path=FOLDER port=8001 engine.max_num_seqs=256
      serve model=qwen3-0.6b host=0.0.0.0       for other machines, too: set EVALENGINE_API_KEY

      record=FOLDER                   write every answer there as part of a run, which `check`, `prove`, `compare` read
      host=127.0.0.1  port=8000       where it listens; port=0 is any that is free
      max_tokens=0                    the most that one choice may request; 0: what the model's context holds
      max_choices=1024 max_open=8192  choices of one request; choices that may wait or run
      max_connections=0               at once; 0: as many as the file descriptors (ulimit -n) leave room for
      max_body_mb=32 max_logprobs=20 client_seconds=60
      model, model.*, engine.*, batch_invariant, numerics, enable_thinking, chat_template_args, chat_template_date

    Also /tokenize, /detokenize, /tokenizer_info, /health and /metrics. Ctrl-C or SIGTERM ends it once the answers that
    run are finished, a second one at once.

    Exit codes: 0 ended as requested, 1 failed, 2 bad usage or configuration."""


@_command("evalengine.cli.warm:main")
def warm(
    model: Annotated[str, Argument(metavar="MODEL", help="a shipped model's name, a folder, a Hub id or a .gguf file")],
    settings: Annotated[list[str] | None, Argument(metavar="[setting=value ...]", show_default=False,
                        parser=setting_of("model.", "engine.", "batch_invariant=", "numerics="), help="those of the "
                        "later runs: engine.*, model.*, numerics, batch_invariant")] = None,
) -> None:  # fmt: skip
    """Compile and compare a model's kernels on this GPU before its first run needs them, for every batch size, and
    keep them in the caches of the user (TRITON_CACHE_DIR, XDG_CACHE_HOME).

      warm qwen3-8b
      warm ./checkpoint engine.max_num_seqs=64
      warm ./checkpoint model.load_format=dummy       reads only config.json: kernels depend on shapes, not on weights

    Exit codes: 0 done, or nothing to compile on a CPU; 1 the kernels differ on this GPU; 2 bad usage."""


@_command("evalengine.cli.tasks:main")
def tasks(
    words: Annotated[list[str] | None, Argument(metavar="[NAME|FILE] [setting=value ...]", show_default=False,
                     help="one task (or a group, or a YAML file of your own: ./my_task.yaml), and settings as for a "
                     "run: task.num_fewshot=5, data_dir=FOLDER, apply_chat_template=true model=NAME, ...",
                     autocompletion=lambda incomplete: load("evalengine.config.shipped:available")("task"))] = None,
    show: Annotated[int | None, Option(metavar="N", min=1, max=1000, help="show its first N documents")] = None,
) -> None:  # fmt: skip
    """List the tasks that can be run: where their rows come from (Hub id @ pinned commit), how many documents are
    evaluated, the metrics, and what a task needs in addition to the rows.

    Exit codes: 0 listed, 2 bad usage, or rows or settings that cannot be used."""


COMMANDS["lm_eval"] = lambda argv: load("evalengine.integrations.lm_eval.cli:main")(argv)  # its options are lm-eval's
