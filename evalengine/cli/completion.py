"""Shell completion of the sub-commands and of the settings' names, by typer: installs it, and answers the shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
ASKS = "_EVALENGINE_COMPLETE"  # the variable by which a shell asks
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
    """Installs or shows the completion, or answers the shell. Raises `ConfigError` for a shell that is not known."""
    if len(words) > 1 and ASKS not in os.environ:
        return _of_shell(words[0], words[1:])
    _name_the_run()
    app = Typer(cls=_Commands, add_completion=True, rich_markup_mode=None)
    app.callback()(lambda: None)
    code: Any = get_command(app).main(list(words), prog_name=PROGRAM, standalone_mode=False)
    if code and words:
        raise ConfigError(f"{words[0]}: your shell is not known; name it: {words[0]} {'|'.join(SHELLS)}")
    return int(code or 0)


def _of_shell(option: str, named: Sequence[str]) -> int:
    """Does what the option says for a shell that is named."""
    if len(named) > 1 or named[0] not in SHELLS:
        raise ConfigError(f"{option} {' '.join(named)}: there are {', '.join(SHELLS)}; without a word it is your shell")
    if option == "--show-completion":
        print(get_completion_script(prog_name=PROGRAM, complete_var=ASKS, shell=named[0]))
    else:
        _, path = install(shell=named[0], prog_name=PROGRAM)
        say(f"{named[0]} completion installed in {path}; it works in a new terminal")
    return 0


def _name_the_run() -> None:
    """Inserts the word `run` where the line holds a setting and no command: `run` completes settings.

    bash ends a word at every `=`, and completes what follows it: of `task`, `=` and `gs` the last word alone. The
    setting's name is handed on by a variable.
    """
    variable = "COMP_WORDS" if os.environ.get(ASKS) == "complete_bash" else "_TYPER_COMPLETE_ARGS"
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
