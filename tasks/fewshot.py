"""Which exemplars a prompt gets, and how turns become its text. Rules of lm-evaluation-harness 0.4.13.

The random draw goes on from document to document (one generator per task, seeded once), so prompt i depends on i and
on no later document. Prompts must therefore be built in document order and before any sharding: split over two ranks,
each with its own generator, 1318 of gsm8k's 1319 prompts change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from evalengine.errors import ConfigError
from evalengine.tasks.dataset import read_local, text_lines
from evalengine.tasks.rows import Rows, check_rows
from evalengine.util.plain_files import read_yaml

Chat = Callable[[list[dict[str, str]]], str]


class OpenChat(Protocol):
    """A `Chat` that can leave the last message open, as a task with a `gen_prefix` needs it."""

    def continued(self, messages: list[dict[str, str]]) -> str:
        """The messages as the template writes them, without the text that ends the last one."""


@dataclass(frozen=True)
class Turn:
    """One message. `delimiter` follows `content` where turns are joined as plain text; chat templates do not see it."""

    role: str  # system | user | assistant
    content: str
    delimiter: str = ""


class Sampler:
    """Draws exemplars from `pool`, for one document after the other.

    `first_n` takes the head of the pool every time; otherwise `random.Random(seed).sample` draws. With `spare` one
    exemplar more is taken, any that equals the evaluated document is dropped, and the first n remain. A pool that
    holds that document several times is drawn from again without it.
    """

    def __init__(
        self, pool: Sequence[dict[str, Any]], *, seed: int, first_n: bool = False, spare: bool = False
    ) -> None:
        self._pool = list(pool)
        self._random = random.Random(seed)
        self._first_n = first_n
        self._spare = spare

    def draw(self, n: int, doc: dict[str, Any]) -> list[dict[str, Any]]:
        """`n` exemplars for `doc`. Raises ConfigError if the pool cannot give that many."""
        if n == 0:
            return []
        num_drawn = n + 1 if self._spare else n
        if num_drawn > len(self._pool):
            raise ConfigError(f"num_fewshot={n} needs {num_drawn} exemplars, but there are {len(self._pool)}")
        drawn = self._pool[:num_drawn] if self._first_n else self._random.sample(self._pool, num_drawn)
        if self._spare:
            drawn = [exemplar for exemplar in drawn if exemplar != doc][:n]
        if len(drawn) < n:
            others = [exemplar for exemplar in self._pool if exemplar != doc]
            if len(others) < n:
                raise ConfigError(f"num_fewshot={n}: only {len(others)} exemplars are not the evaluated row itself")
            drawn = others[:n] if self._first_n else self._random.sample(others, n)
        return drawn


def read_exemplars(file: str) -> Rows:
    """Exemplars from a file that the user names: .jsonl, .json, .yaml or .yml, a list of rows. Raises ConfigError."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"task.fewshot_file={file} does not exist or is not a file")
    if path.suffix not in (".yaml", ".yml"):
        return check_rows(read_local(path, "exemplars", text_lines))
    try:
        rows = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"task.fewshot_file={file} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"task.fewshot_file={file} must be a YAML list of mappings")
    return check_rows(Rows(rows, str(path)), thorough=True)


def joined(first: str, second: str, delimiter: str = " ") -> str:
    """The two with `delimiter` between them, unless white space is there already, or one is empty."""
    return first + gap(first, second, delimiter) + second


def gap(first: str, second: str, delimiter: str) -> str:
    """`delimiter`, where neither text has white space at their boundary and neither is empty; else nothing."""
    return "" if not first or not second or first[-1].isspace() or second[0].isspace() else delimiter


def prefixed(turns: Sequence[Turn], prefix: str, delimiter: str) -> list[Turn]:
    """A question, with or without its answer, as turns in which the answer begins with `prefix`.

    delimiter: what may stand between a question without an answer and the prefix.
    """
    user, *rest = turns
    between = gap(user.content, prefix, user.delimiter if rest else delimiter)
    answers = [Turn(turn.role, joined(prefix, turn.content), turn.delimiter) for turn in rest]
    return [Turn(user.role, user.content, between), *(answers or [Turn("assistant", prefix)])]


def render(turns: Sequence[Turn], chat: Chat | None, *, multiturn: bool) -> str:
    """The prompt's text: the turns joined as they are, or through the model's chat template `chat`. An open
    answer (the last turn is the assistant's) stays open.

    With `multiturn` off, everything but the system message becomes one user message, joined as in plain text.
    """
    if chat is None:
        return "".join(turn.content + turn.delimiter for turn in turns)
    open_turn = [turns[-1]] if turns[-1].role == "assistant" else []
    before = [*turns[: len(turns) - len(open_turn)]]
    if not multiturn:
        system = [turn for turn in before if turn.role == "system"]
        others = [turn for turn in before if turn.role != "system"]
        if open_turn:  # the open answer is a separate message, so no delimiter follows the last question
            others[-1] = Turn(others[-1].role, others[-1].content)
        before = [*system, Turn("user", "".join(turn.content + turn.delimiter for turn in others))]
    messages = [{"role": turn.role, "content": turn.content} for turn in (*before, *open_turn)]
    return cast(OpenChat, chat).continued(messages) if open_turn else chat(messages)
