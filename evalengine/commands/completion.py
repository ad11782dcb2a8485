"""Shell completion of the sub-commands, by typer: installs it, and answers the shell."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from typer import Context, Typer
from typer.core import TyperGroup
from typer.main import get_command

from evalengine.bench.names import BENCHES
from evalengine.commands import MODULES
from evalengine.commands.words import Command

PROGRAM = "evalengine"  # the installed script; shells complete programs, not `python -m`


class _Commands(TyperGroup):
    """The sub-commands. A command is imported only when its own words are completed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return ["run", *MODULES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "run":
            return import_module("evalengine.commands.run").command().typer_command
        if cmd_name not in MODULES:
            return None
        module = import_module(MODULES[cmd_name])
        if cmd_name == "bench":
            return _group({**dict.fromkeys(BENCHES, module.BENCH), **module.OWN})
        return module.main.typer_command if isinstance(module.main, Command) else None


def complete(words: Sequence[str]) -> int:
    """Installs or shows the completion, or answers the shell, which asks by the variable _EVALENGINE_COMPLETE."""
    app = Typer(cls=_Commands, add_completion=True, rich_markup_mode=None)
    app.callback()(_no_words)
    code: Any = get_command(app).main(list(words), prog_name=PROGRAM, standalone_mode=False)
    return int(code or 0)


def _group(commands: dict[str, Command]) -> Any:
    group: Any = get_command(_with_callback())
    group.commands = {name: command.typer_command for name, command in commands.items()}
    return group


def _with_callback() -> Typer:
    app = Typer(add_completion=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(_no_words)
    return app


def _no_words(ctx: Context) -> None:
    """The commands of evalengine."""
