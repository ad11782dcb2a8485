"""Declares and parses a sub-command's words by typer: the annotated parameters of a function.

This module also adds what typer lacks: options of several words, epilogs that keep their lines, lists and counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from inspect import cleandoc
from typing import Any

from typer import BadParameter, Exit, Typer, TyperException
from typer.core import TyperCommand
from typer.main import get_command

from evalengine.errors import ConfigError
from evalengine.util.command import PROGRAM, Namespace
from evalengine.util.plugins import load

SEVERAL = " ..."  # an option whose metavar ends with this takes all words up to the next option
SETTING = re.compile(r"[~+]{0,2}[a-z_][\w.@]*=")


class Words(TyperCommand):
    """A command whose options may take several words (`--axes batch order`), and whose epilog keeps its lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses as click does, after `--axes batch order` has become `--axes batch --axes order`."""
        several = {name: param.metavar or "" for param in self.params for name in param.opts}
        several = {name: metavar for name, metavar in several.items() if metavar.endswith(SEVERAL)}
        spread: list[str] = []
        option, first = "", False
        for word in args:
            if word.startswith("-"):
                option, first = word if word in several else "", True
            elif option and SETTING.match(word) and "=" not in several[option]:
                option = ""
            elif option:
                if not first:
                    spread.append(option)
                first = False
            spread.append(word)
        rest: list[str] = super().parse_args(ctx, spread)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Shows arguments by their metavar alone: `RUN`, not `RUN <list[str]>`."""
        for param in self.params:
            if param.param_type_name == "argument":
                setattr(param, "display_type_rich", lambda ctx: None)  # noqa: B010
        super().format_options(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the epilog unchanged: its examples and exit codes are lines, which must not be joined."""
        formatter.write(f"\n{self.epilog}\n")


class Command:
    """A sub-command: its arguments and options, and the function that does its work.

    name: its word ("compare"). words: a function whose annotated parameters are the arguments and options; it raises
    `TyperException` for bad usage, and returns a namespace, or None for its arguments unchanged. Its docstring's first
    paragraph is the help's first part, the rest of it follows the options (or `epilog`, if given). work:
    "module:function", imported after the words were parsed; it takes the namespace and returns the exit code.
    program: what precedes the name on the command line.
    """

    def __init__(
        self, name: str, words: Callable[..., Any], work: str, epilog: str | None = None, program: str = PROGRAM
    ) -> None:
        self.name, self.words, self.work, self.epilog, self.program = name, words, work, epilog, program

    def __call__(self, argv: Sequence[str]) -> int:
        """Runs the command with the words after its name; returns the exit code. Raises ConfigError for bad usage."""
        arguments = self.parse(argv)
        if arguments is None:  # --help
            return 0
        code: int = load(self.work)(arguments)
        return code

    def parse(self, argv: Sequence[str]) -> Any:
        """The namespace of the arguments, with `argv` added; None for --help. An absent list is empty."""
        try:
            # Not by typer's `main`, which returns 130 for a Ctrl-C as it returns 0 for --help.
            with self.typer_command.make_context(f"{self.program} {self.name}", list(argv)) as context:
                arguments = self.typer_command.invoke(context)
        except Exit:
            return None
        except TyperException as error:
            raise self.bad_usage(error.format_message()) from error
        arguments.argv = list(argv)
        return arguments

    def bad_usage(self, problem: str) -> ConfigError:
        """The error for bad usage; it names the command's help."""
        return ConfigError(f"{self.name}: {problem} (see {self.name} --help)")

    @property
    def summary(self) -> str:
        """The first paragraph of the words' docstring, in one line."""
        return " ".join(cleandoc(self.words.__doc__ or "").partition("\n\n")[0].split())

    @cached_property
    def typer_command(self) -> TyperCommand:
        """The command that typer makes of the declared words; shell completion reads it as well."""

        @wraps(self.words)
        def declared(**given: Any) -> Namespace:
            lists = [param.name for param in command.params if param.nargs == -1 or getattr(param, "multiple", False)]
            given |= {name: [] for name in lists if given[name] is None}
            return self.words(**given) or Namespace(**given)

        rest = cleandoc(self.words.__doc__ or "").partition("\n\n")[2]
        epilog = rest if self.epilog is None else self.epilog
        app = Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        context = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        app.command(cls=Words, help=self.summary, epilog=epilog, context_settings=context)(declared)
        command: Any = get_command(app)
        return command


def names(text: str | list[str]) -> list[str]:
    """The names of a text with commas between them, each once."""
    if isinstance(text, list):
        return text
    unique = list(dict.fromkeys(text.split(",")))
    if not all(unique):
        raise BadParameter(f"{text!r}: give names with commas between them")
    return unique


def counts(text: str) -> list[int]:
    """Positive integers with commas between them, each once."""
    words = names(text)
    if not all(word.isdecimal() and 0 < int(word) < 1 << 31 for word in words):
        raise BadParameter(f"{text!r}: give integers of at least 1 with commas between them")
    return [int(word) for word in words]


def setting_of(*allowed: str) -> Callable[[str], str]:
    """A parser that accepts `SETTING=VALUE` if it begins with one of `allowed`."""

    def check(text: str) -> str:
        if "=" not in text or not text.startswith(allowed):
            raise BadParameter(f"{text!r} must set one of {', '.join(name.rstrip('=.') for name in allowed)}")
        return text

    return check
