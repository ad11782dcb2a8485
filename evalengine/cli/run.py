"""`python -m evalengine [run] [setting=value ...]`: a run, a sweep or an experiment; its help names every command.

Shell completion of the sub-commands and of the settings' names, by typer: installs it, and answers the shell.

Hydra is imported for settings and torch when a run starts, so that configuration errors answer at once.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer
from typer.core import TyperGroup
from typer.main import get_command

from evalengine.cli.command import SETTING, Command
from evalengine.cli.commands import COMMANDS
from evalengine.config.shipped import available
from evalengine.errors import ConfigError, listed, near
from evalengine.plain_text import say, warn
from evalengine.util.command import PROGRAM, Namespace, exit_code
from evalengine.util.phases import phase
from evalengine.util.plugins import load
from evalengine.version import CONTRACT_VERSION, __version__

if TYPE_CHECKING:
    from evalengine.config.compose import Job
    from evalengine.config.schema import Config

NAMED = ("task", "model", "experiment", "cluster")  # the settings whose values are names of files
# The variable with the setting's name, where a shell sends its value alone.
SETTING_NAME = "_EVALENGINE_COMPLETED_SETTING"
NAMES = ("run", *COMMANDS)  # of the commands
SCRIPT = "evalengine"  # the installed script; shells complete programs, not `python -m`
REQUEST = "_EVALENGINE_COMPLETE"  # the variable of a shell that requests completions
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
OPTIONS = ("-m", "-c", "-h", "--multirun", "--cfg", "--version", "--help")
EPILOG = """\
  task=gsm8k                    what to run; several: 'task=[gsm8k,arc_easy]'; a file of yours: ./my_task.yaml
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
  cache=FOLDER                  cached answers: what was computed once is read; cache.audit=0.01

  experiment=noise_floor        a sweep, compared: who equals whom, and what fast arithmetic moves
  experiment=checkpoints        one model's steps: each metric against the step; "model.path=glob('out/checkpoint-*')"
  --install-completion [SHELL]  completes commands, tasks and models in your shell; --show-completion prints how

Commands, each with its --help:
{commands}
  lm_eval   lm-eval's own command line, any of its tasks on this engine

A RUN is a run's folder; or `latest` (the newest in results/), FOLDER:latest, or SWEEP:3 (run 3 of an experiment).

Exit codes: 0 done, 1 failed (compare, gate: the runs differ), 2 bad usage or configuration, 3 gate: inconclusive,
130 ended by Ctrl-C, 143 by SIGTERM (the same command resumes)."""


def command() -> Command:
    """Return `run`, whose name may be left out of its words. Its help names the tasks and models that are there."""
    lists = {f"{group}s": _wrapped(32, "  ".join(available(group))) for group in ("task", "model")}
    own = [command for command in COMMANDS.values() if isinstance(command, Command)]
    lines = [f"  {one.name:10}{_wrapped(12, one.summary.partition('. ')[0].rstrip('.')).lstrip()}" for one in own]
    lists["commands"] = "\n".join(lines)
    return _Run("run", _words, "evalengine.cli.run:work", EPILOG.format(**lists))


def _names(incomplete: str) -> list[str]:
    """The completions of a setting that names files of the configuration: task=gsm8k of task=gs, a list's last name."""
    setting, _, value = incomplete.rpartition("=")
    group = setting or os.environ.get(SETTING_NAME, "")
    before = incomplete.removesuffix(re.split(r"[,\[]", value)[-1])
    return [before + name for name in available(group)] if group in NAMED else []


def _words(
    words: Annotated[list[str] | None, Argument(metavar="setting=value", show_default=False, help="what to run, "
                     "and how", autocompletion=_names)] = None,
    multirun: Annotated[bool, Option("-m", "--multirun", help="one run a value: -m engine.max_num_seqs=1,8 "
                                     "batch_invariant=true,false")] = False,
    cfg: Annotated[bool, Option("-c", "--cfg", help="print the resolved configuration (every setting) and "
                                "stop")] = False,
    version: Annotated[bool, Option("--version", help="version and numerics contract")] = False,
) -> Namespace:  # fmt: skip
    """Runs evaluation tasks through evalengine's own inference engine and leaves results/<task>-<model>-<time>-<id>/.
    The word run may be left out."""
    return Namespace(settings=_settings(words or []), multirun=multirun, cfg=cfg, version=version)


class _Run(Command):
    """A word of `run` that is no setting may be the name of a command, misspelt: that is reported before all else."""

    def parse(self, argv: Sequence[str]) -> Any:
        options = [word for word in argv if word.startswith("-") and word.partition("=")[0] not in OPTIONS]
        for word in _settings([word for word in argv if not word.startswith("-")]):
            if "=" not in word and not word.startswith("~") and (word == argv[0] or not options):
                raise ConfigError(_unknown_word(word, word == argv[0]))
        if options:
            name = options[0].lstrip("-").partition("=")[0].replace("-", "_")
            raise ConfigError(f"{options[0]}: settings have no dashes; write {PROGRAM} {name}=VALUE; {PROGRAM} lm_eval "
                              "takes lm-eval's own options")  # fmt: skip
        return super().parse(argv)


def _settings(words: list[str]) -> list[str]:
    return words[1:] if words[:1] == ["run"] else words


def _unknown_word(word: str, first: bool) -> str:
    """Return the message about a word that is no setting."""
    if word in COMMANDS:
        return f"{word}: a command's name comes first: {PROGRAM} {word} ..."
    meant = [f"{group}={word}" for group in ("task", "model", "experiment") if word in available(group)]
    if meant or not first:
        hint = f"; did you mean {meant[0]}?" if meant else "; quote what holds spaces: 'task=[a, b]'"
        return f"{word}: a setting is one word, name=value, without spaces around its ={hint}"
    return f"{word}: no such command; {near(word, NAMES)}"


def _wrapped(indent: int, text: str) -> str:
    """The text in lines of the help's width, indented."""
    return textwrap.fill(text, 120, initial_indent=" " * indent, subsequent_indent=" " * indent, break_on_hyphens=False)


def work(arguments: Namespace) -> int:
    """Runs what the settings describe; returns the exit code."""
    if arguments.version:
        say(f"evalengine {__version__} (contract {CONTRACT_VERSION})")
        return 0
    from evalengine.config.compose import compose_jobs, experiment_name
    from evalengine.config.schema import to_yaml

    with phase("settings"):
        jobs = compose_jobs(arguments.settings, arguments.multirun)
    if arguments.cfg:
        print("---\n".join(to_yaml(job.config) for job in jobs), end="")
        return 0
    config = jobs[0].config
    if config.progress and sys.stderr is not None and sys.stderr.isatty():  # up to 15 s pass before the first bar
        needed = "libraries and rows" if config.model.api is not None else "libraries, rows and the model"
        warn(f"{listed([*config.tasks], 3)} on {config.model.name}: loading {needed} ...", "")
    if name := experiment_name(arguments.settings):
        from evalengine.cli.experiment import run_experiment

        return run_experiment(name, jobs, partial(run_one, command=arguments.argv))
    return _run_all(jobs, arguments.argv)


def _run_all(jobs: list[Job], words: Sequence[str]) -> int:
    codes: list[int] = []
    runs: list[tuple[int, bool, str | None]] = []
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            warn(f"[{number}/{len(jobs)}] {' '.join(job.overrides)}", "")
        shown: list[str | None] = []
        codes.append(exit_code(partial(run_one, job.config, words, shown)))  # after a failure the sweep continues
        runs.append((number, job.config.batch_invariant, shown[0] if shown else None))
    if len(jobs) > 1:
        from evalengine.report.sweep.sweep import agreement

        for line in agreement(runs):
            say(line)
    return max(codes)


def run_one(config: Config, command: Sequence[str] | None = None, digests: list[str | None] | None = None) -> int:
    """Make one run, with its report, table and digest, which is added to `digests` (None through an endpoint).
    command: the command line's words."""
    from evalengine.api.perform import perform

    shown: list[str | None] = [] if digests is None else digests
    table = "evalengine.report.run_table:print_report"
    if config.model.api is not None:
        table = "evalengine.integrations.endpoint.run:print_run"
    perform(config, command, show=lambda folder: shown.append(load(table)(folder)))
    return 0


class _Commands(TyperGroup):
    """The sub-commands. A command is imported only when its words are completed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*NAMES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = command() if cmd_name == "run" else COMMANDS.get(cmd_name)
        return found.typer_command if isinstance(found, Command) else None


def complete(words: Sequence[str]) -> int:
    """Answers the shell, or shows or installs the completion for the shell that is named (default: the user's).

    Raises `ConfigError` for an unknown shell.
    """
    if REQUEST in os.environ:
        _name_the_run()
        app = Typer(cls=_Commands, add_completion=True, rich_markup_mode=None)
        app.callback()(lambda: None)
        return int(get_command(app).main([], prog_name=SCRIPT, standalone_mode=False) or 0)
    from typer.completion import get_completion_script, install

    option, *named = words
    (shell,) = named if len(named) == 1 else [Path(os.environ.get("SHELL", "")).name]
    if named[1:] or shell not in SHELLS:
        raise ConfigError(f"{' '.join(words)}: there are {', '.join(SHELLS)}; name your shell: {option} bash")
    if option == "--show-completion":
        print(get_completion_script(prog_name=SCRIPT, complete_var=REQUEST, shell=shell))
    else:
        _, path = install(shell=shell, prog_name=SCRIPT)
        say(f"{shell} completion installed in {path}; it works in a new terminal")
    return 0


def _name_the_run() -> None:
    """Insert the word `run` where the line contains a setting and no command: `run` completes settings.

    bash ends a word at every `=`, and completes what follows it: of `task`, `=` and `gs` the last word alone. The
    setting's name is handed on by a variable.
    """
    variable = "COMP_WORDS" if os.environ.get(REQUEST) == "complete_bash" else "_TYPER_COMPLETE_ARGS"
    line = os.environ.get(variable, "")
    between = "\n" if "\n" in line else " "  # typer's script for bash writes a word a line
    words = line.split(between)
    if variable == "COMP_WORDS":
        words = words[: int(os.environ["COMP_CWORD"]) + 1]
        if "=" in words[-2:]:
            end = -2 if words[-1] == "=" else -3
            os.environ[SETTING_NAME] = words[end]
            words[end:] = [words[-1].removeprefix("=")]
        words = between.join(words).replace(f"{between}={between}", "=").split(between)
    is_setting = os.environ.get(SETTING_NAME) or any(map(SETTING.match, words))
    if is_setting and not {*words[1:2]} & {*NAMES}:
        words.insert(1, "run")
    os.environ |= {variable: " ".join(words), "COMP_CWORD": str(len(words) - 1)}
