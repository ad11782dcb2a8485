"""Shell completion of the sub-commands and of the settings' names, by typer: installs it, and answers the shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer import Typer
from typer.completion import get_completion_script, install
from typer.core import TyperGroup
from typer.main import get_command

from evalengine.cli import run
from evalengine.cli.command import SETTING, Command
from evalengine.cli.commands import COMMANDS
from evalengine.errors import ConfigError
from evalengine.plain_text import say

PROGRAM = "evalengine"  # the installed script; shells complete programs, not `python -m`
REQUEST = "_EVALENGINE_COMPLETE"  # the variable of a shell that requests completions
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


class _Commands(TyperGroup):
    """The sub-commands. A command is imported only when its own words are completed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["run", *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "run":
            return run.command().typer_command
        command = COMMANDS.get(cmd_name)
        return command.typer_command if isinstance(command, Command) else None


def complete(words: Sequence[str]) -> int:
    """Answers the shell, or shows or installs the completion for the shell that is named (default: the user's).

    Raises `ConfigError` for an unknown shell.
    """
    if REQUEST in os.environ:
        _name_the_run()
        app = Typer(cls=_Commands, add_completion=True, rich_markup_mode=None)
        app.callback()(lambda: None)
        return int(get_command(app).main([], prog_name=PROGRAM, standalone_mode=False) or 0)
    option, *named = words
    (shell,) = named if len(named) == 1 else [Path(os.environ.get("SHELL", "")).name]
    if named[1:] or shell not in SHELLS:
        raise ConfigError(f"{' '.join(words)}: there are {', '.join(SHELLS)}; name your shell: {option} bash")
    if option == "--show-completion":
        print(get_completion_script(prog_name=PROGRAM, complete_var=REQUEST, shell=shell))
    else:
        _, path = install(shell=shell, prog_name=PROGRAM)
        say(f"{shell} completion installed in {path}; it works in a new terminal")
    return 0


def _name_the_run() -> None:
    """Inserts the word `run` where the line holds a setting and no command: `run` completes settings.

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
            os.environ[run.SETTING_NAME] = words[end]
            words[end:] = [words[-1].removeprefix("=")]
        words = between.join(words).replace(f"{between}={between}", "=").split(between)
    is_setting = os.environ.get(run.SETTING_NAME) or any(map(SETTING.match, words))
    if is_setting and words[1:2] not in ([name] for name in ("run", *COMMANDS)):
        words.insert(1, "run")
    os.environ |= {variable: " ".join(words), "COMP_CWORD": str(len(words) - 1)}
