"""How a sub-command's words are declared and parsed: a function's annotated parameters, by typer.

What typer lacks stands here, too: options of several words, epilogs as they are written, lists and counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from typer import BadParameter, Typer, TyperException
from typer.core import TyperCommand
from typer.main import get_command

from evalengine.command import PROGRAM, Namespace
from evalengine.errors import ConfigError

SEVERAL = " ..."  # an option whose metavar ends so takes all words up to the next option
SETTING = re.compile(r"[~+]{0,2}[a-z_][\w.@]*=")
TEXTS = (  # typer's complaint -> ours, which names the word first
    (r"No such option: (\S+)", r"unrecognized arguments: \1"),
    (r"Got unexpected extra arguments? \((.*)\)", r"unrecognized arguments: \1"),
    (r"Missing (?:argument|option) '([^']*)'.*", r"the following arguments are required: \1"),
    (r"Option '(.*)' requires an argument\.", r"argument \1: expected one argument"),
    (r"Invalid value for '([^']*)': (?:Value error, )?", r"argument \1: "),
    (r"Input should be a valid integer.*", "invalid int value: it must be an integer"),
    (r"Input should be a valid number.*", "invalid float value: it must be a number"),
    (r"'([^']*)' is not one of (.*)\.", r"invalid choice: '\1' (choose from \2)"),
)


class Words(TyperCommand):
    """A command whose options may take several words (`--axes batch order`), and whose epilog keeps its lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's, after `--axes batch order` has become `--axes batch --axes order`."""
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
        """Arguments by their metavar alone: `RUN`, not `RUN <list[str]>`."""
        for param in self.params:
            if param.param_type_name == "argument":
                setattr(param, "display_type_rich", lambda ctx: None)  # noqa: B010
        super().format_options(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The epilog as it is written: examples and exit codes are lines, which must not be filled."""
        formatter.write(f"\n{self.epilog}\n")


class BadUsage(Exception):
    """What is wrong with a command's words; `Command` names the command and its help."""


class Command:
    """A sub-command: its words, and what does the work once they are good.

    name: its words ("compare", "bench host"). words: a function whose annotated parameters are the arguments and
    options and whose docstring is the help's first part; it returns them as a namespace, or raises `BadUsage`. work:
    "module:function", imported after the words were parsed; it takes the namespace and returns the exit code.
    """

    def __init__(self, name: str, words: Callable[..., Namespace], work: str, epilog: str) -> None:
        self.name, self.words, self.work, self.epilog = name, words, work, epilog

    def __call__(self, argv: Sequence[str]) -> int:
        """Runs the command with the words after its name; returns the exit code. Raises what is wrong with them."""
        arguments = self.parse(argv)
        if not isinstance(arguments, Namespace):  # --help
            return 0
        module, _, function = self.work.partition(":")
        code: int = getattr(import_module(module), function)(arguments)
        return code

    def parse(self, argv: Sequence[str]) -> Any:
        """The words as the declared function gives them back, with `argv` besides; no namespace for --help."""
        try:
            found = self.typer_command.main(list(argv), prog_name=f"{PROGRAM} {self.name}", standalone_mode=False)
        except (TyperException, BadUsage) as error:
            said = error.format_message() if isinstance(error, TyperException) else str(error)
            for theirs, ours in TEXTS:
                said = re.sub(theirs, ours, said)
            raise self.bad_usage(said) from error
        if isinstance(found, Namespace):
            found.argv = list(argv)
        return found

    def bad_usage(self, said: str) -> ConfigError:
        """The error for words that are wrong together."""
        return ConfigError(f"{self.name}: {said} (see {self.name} --help)")

    @cached_property
    def typer_command(self) -> TyperCommand:
        """What typer makes of the declared words; shell completion reads it as well."""
        app = Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        context = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        app.command(cls=Words, epilog=self.epilog, context_settings=context)(self.words)
        command: Any = get_command(app)
        return command


def names(text: str | list[str]) -> list[str]:
    """Names with commas between them, each once."""
    if isinstance(text, list):
        return text
    found = list(dict.fromkeys(text.split(",")))
    if not all(found):
        raise BadParameter(f"{text!r}: give names with commas between them")
    return found


def count(text: str | int) -> int:
    """How many of something."""
    if not str(text).isdecimal() or not 0 < int(text) < 1 << 31:
        raise BadParameter(f"{text!r}: must be an integer of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Several of them, with commas between, each once."""
    return [count(word) for word in names(text)]


def setting_of(*allowed: str) -> Callable[[str], str]:
    """Takes `SETTING=VALUE` if it begins with one of `allowed`."""

    def check(text: str) -> str:
        if "=" not in text or not text.startswith(allowed):
            raise BadParameter(f"{text!r} must set one of {', '.join(name.rstrip('=.') for name in allowed)}")
        return text

    return check
