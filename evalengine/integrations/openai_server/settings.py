"""The words of `serve`: the server's own settings, and those of the model and the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Ge, Le

from evalengine.config.schema import Whole
from evalengine.errors import ConfigError
from evalengine.util.validation import read_as

# Settings of a run that a server has, too; a name that ends with a dot stands for all below it.
OF_THE_ENGINE = ("model", "model.", "engine.", "batch_invariant", "numerics")
OF_THE_TEMPLATE = ("chat_template_date", "chat_template_args", "enable_thinking")
TEXTS = ("host", "record")  # all others are integers
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Least0 = Annotated[Whole, Ge(0), Le(1 << 24)]
Least1 = Annotated[Whole, Ge(1), Le(1 << 24)]
_WORD = re.compile(r"[+~]*([\w.@/]+)=(.*)", re.S)


@dataclass(frozen=True)
class ServeSettings:
    """The server's own settings."""

    host: str = "127.0.0.1"
    record: str = ""  # a folder for runs: every answer is a leaf of one; "": nothing is recorded
    port: Annotated[Whole, Ge(0), Le(65_535)] = 8000  # 0: any that is free
    max_tokens: Least0 = 0  # the most that one choice may ask for; 0: as many as the model's context holds
    max_choices: Least1 = 1024  # of one request: its prompts times n
    max_open: Least1 = 8192  # choices that wait or run; beyond them a client gets status 429
    max_body_mb: Least1 = 32  # of a request's body
    max_logprobs: Least1 = 20  # alternatives a token
    max_connections: Least0 = 0  # at once; 0: as many as the file descriptors (`ulimit -n`) leave room for
    client_seconds: Least1 = 60  # that a client may take to send its head or its body, or to take a piece of its answer

    @property
    def max_body(self) -> int:
        """Bytes of a request's body."""
        return self.max_body_mb << 20


def read_words(words: Sequence[str]) -> tuple[ServeSettings, list[str]]:
    """The server's settings, and the words that are left for the model and its engine.

    Raises: ConfigError with all that is wrong.
    """
    own: dict[str, int | str] = {}
    others = []
    problems = []
    names = {item.name for item in fields(ServeSettings)}
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            problems.append(f"{word}: settings are written name=value")
        elif (name := match[1]) in names:
            problems += [f"{name}: is given twice"] if name in own else []
            number = name not in TEXTS and match[2].isdecimal() and len(match[2]) < 10
            own[name] = int(match[2]) if number else match[2]
        elif name in (*OF_THE_ENGINE, *OF_THE_TEMPLATE) or name.startswith(OF_THE_ENGINE[1:3]):
            others.append(word)
        else:
            known = ", ".join([*sorted(names), *(f"{n}*" if n.endswith(".") else n for n in OF_THE_ENGINE)])
            problems.append(f"{name}: no setting of a server; there are {known}, {', '.join(OF_THE_TEMPLATE)}")
    try:
        settings = read_as(ServeSettings, own)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError([f"serve: {problem}" for problem in problems])
    return settings, others
