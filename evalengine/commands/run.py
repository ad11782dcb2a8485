"""`python -m evalengine [run] [setting=value ...]`: makes a run, a sweep or an experiment, or prints the help.

Hydra is imported for settings and torch when a run starts, so that help and configuration errors answer at once.
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from evalengine.command import exit_code
from evalengine.commands import MODULES
from evalengine.contract import CONTRACT_VERSION
from evalengine.errors import ConfigError
from evalengine.shipped import available
from evalengine.version import __version__

if TYPE_CHECKING:
    from evalengine.compose import Job
    from evalengine.config import Config

COMMANDS = ("run", *MODULES)
FLAGS = {  # word -> flag; a run takes these besides settings
    **dict.fromkeys(("-h", "--help"), "help"),
    **dict.fromkeys(("-m", "--multirun"), "multirun"),
    **dict.fromkeys(("-c", "--cfg"), "cfg"),
    "--version": "version",
}
HELP = """\
Usage: python -m evalengine [run] [setting=value ...] [-m] [--cfg] [--help] [--version]
       python -m evalengine tasks [NAME [--show N]] [setting=value ...]
       python -m evalengine compare RUN RUN [RUN ...] [...]
       python -m evalengine baseline RUN -o FILE
       python -m evalengine gate BASELINE RUN|-- SETTINGS --policy POLICY [...]
       python -m evalengine report RUN [RUN ...] [-o FILE]
       python -m evalengine explain RUN RUN --item ITEM [...]
       python -m evalengine verify [engine|kernels] [setting=value ...] [...]
       python -m evalengine bench [matmul|attention|rows|forward|all ...|throughput|statistics] [...]
       python -m evalengine cache FOLDER [--prune LIMIT]
       python -m evalengine prove RUN --item ITEM -o FILE
       python -m evalengine check FILE --model PATH | RUN --sample N
       python -m evalengine lm_eval --model evalengine --model_args pretrained=MODEL,... --tasks TASK [...]

Runs evaluation tasks through evalengine's own inference engine and leaves results/<task>-<model>-<time>-<id>/.

  task=gsm8k                    what to run; several in one run: task=[gsm8k,arc_easy]; a file of yours: ./my_task.yaml
{tasks}
  model=tinymath                what to run it on; or model.path=<folder, Hub id or .gguf file>
{models}
  limit=16                      documents per task
  task.num_fewshot=5            for every selected task; tasks.gsm8k.num_fewshot=5 for that one
  batch_invariant=true          false: quickest arithmetic, whose bits may depend on the batch
  data_dir=FOLDER               rows from FOLDER/<dataset>/<split>.jsonl, not from the Hub
  engine.max_num_seqs=256       the engine: engine.dtype, engine.device, engine.max_model_len, ...
  cluster=ray                   replicas on many GPUs: cluster.replicas=4 cluster.address=HOST:PORT cluster.audit=0.02
  apply_chat_template=true      the prompts as the model's chat template writes them, on chat_template_date
  system_instruction=TEXT       seed=0   long_prompts=truncate|error   output_dir=results   resume=auto|never|FOLDER
  cache=FOLDER                  answers kept between runs: what was computed once is read; cache.audit=0.01

  -m, --multirun                one run a value: -m engine.max_num_seqs=1,8 batch_invariant=true,false
  -m hydra/launcher=submitit_slurm  the runs as jobs of SLURM: hydra.launcher.partition=gpu, ...
  experiment=noise_floor        such a sweep, compared: who equals whom, and what fast arithmetic moves
  experiment=checkpoints        one model's steps: each metric against the step; "model.path=glob('out/checkpoint-*')"
  -c, --cfg                     print the resolved configuration (every setting) and stop
  -h, --help                    this text
  --version                     version and numerics contract
  --install-completion          completes the sub-commands and their options in your shell; --show-completion prints how

  tasks [NAME --show 3]         the tasks: rows, metrics, what they need; a task's prompts and targets (tasks --help)
  compare RUN RUN               are runs the same; if not, where, and why; of models: which is better (compare --help)
  baseline RUN -o FILE          a run as one small file that a gate can be held to (baseline --help)
  gate BASELINE RUN             may this change be merged: exit code 0, 1 or 3 (gate --help)
  report RUN [RUN ...]          a run, several compared, or a folder's list of runs, as one HTML file (report --help)
  explain RUN RUN --item ITEM   the first layer and op where they part (explain --help)
  verify                        certifies this installation: no schedule, no kernel changes a bit (verify --help)
  bench                         measures the kernels, forward steps and whole runs on this GPU (bench --help)
  prove RUN --item ITEM -o FILE one item of a run as a receipt that anyone can check (prove --help)
  check FILE --model PATH       computes a receipt's item, or a sample of a run's, again: does every bit agree
  cache FOLDER                  what a cache of answers holds, and making it smaller (cache --help)
  lm_eval                       lm-eval's own command line, any of its tasks on this engine (lm_eval --help)

A RUN is a run's folder; or `latest` (the newest in results/), FOLDER:latest, or SWEEP:3 (run 3 of an experiment).

Exit codes: 0 done, 1 failed (compare, gate: the runs differ), 2 bad usage or configuration, 3 gate: inconclusive."""


def main(argv: Sequence[str]) -> int:
    """Runs what the settings describe; returns the exit code."""
    flags = {FLAGS[word] for word in argv if word in FLAGS}
    overrides = [word for word in argv if word not in FLAGS]
    if overrides[:1] == ["run"]:
        del overrides[0]
    if options := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(f"unrecognized arguments: {' '.join(options)} (see --help)")
    if wrong := [word for word in overrides if "=" not in word and not word.startswith("~")]:
        raise ConfigError(_unknown_word(wrong[0]))
    if {"help", "version"} & flags:
        version = f"evalengine {__version__} (contract {CONTRACT_VERSION})"
        print(_help() if "help" in flags else version, flush=True)
        return 0
    from evalengine.compose import compose_jobs, experiment_name
    from evalengine.config import to_yaml

    jobs = compose_jobs(overrides, "multirun" in flags)
    if "cfg" in flags:
        print("---\n".join(to_yaml(job.config) for job in jobs), end="")
        return 0
    if name := experiment_name(overrides):
        from evalengine.experiment import run_experiment

        return run_experiment(name, jobs, partial(_run, command=argv))
    if jobs[0].launcher is not None:
        from evalengine.launch import submit

        return submit(jobs, argv)
    return _run_all(jobs, argv)


def _unknown_word(word: str) -> str:
    for group in ("task", "model", "experiment"):
        if word in available(group):
            return f"{word}: settings are written name=value; did you mean {group}={word}?"
    near = difflib.get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(COMMANDS)} (see --help)"
    return f"{word}: no such command; {hint}"


def _help() -> str:
    return HELP.format(tasks=_wrapped(available("task")), models=_wrapped(available("model")))


def _wrapped(names: list[str]) -> str:
    """The names in lines of the help's width, indented like the help's second column."""
    indent = " " * 32
    return textwrap.fill("  ".join(names), 120, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _run_all(jobs: list[Job], words: Sequence[str]) -> int:
    codes = []
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            print(f"[{number}/{len(jobs)}] {' '.join(job.overrides)}", file=sys.stderr, flush=True)
        codes.append(exit_code(partial(_run, job.config, words)))  # a failure becomes a code, and the sweep goes on
    return max(codes)


def _run(config: Config, command: Sequence[str] | None = None) -> int:
    """Makes one run, with its report, table and digest. command: the command line's words."""
    from evalengine.api.perform import perform
    from evalengine.report.terminal.run_table import print_report

    print_report(perform(config, command))
    return 0
