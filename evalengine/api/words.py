"""Writes Python's arguments as words of the command line, so that one code serves both.

{"limit": 8, "engine": {"max_num_seqs": 4}}    ->    limit=8 engine.max_num_seqs=4
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from evalengine.config.arguments import shown
from evalengine.config.texts import escape_problems, is_text

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_/-]*")  # texts that need no quotes, unless they are words of the grammar
_WORDS = ("null", "true", "false", "inf", "nan")
_NAME = re.compile(r"[A-Za-z_][\w./-]*")  # a setting's name


def words(settings: Mapping[str, Any], problems: list[str], above: str = "") -> list[str]:
    """A word for each setting; settings in a mapping have dotted names. Each bad name or value adds a sentence to
    `problems`."""
    texts: list[str] = []
    for name, value in settings.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{above}{shown(name)}: must be a setting's name")
        elif isinstance(value, Mapping) and value:
            texts += words(value, problems, f"{above}{name}.")
        else:
            text = _text(value, f"{above}{name}", problems)
            texts += [] if text is None else [f"{above}{name}={text}"]
    return texts


def task_word(tasks: Any, problems: list[str]) -> list[str]:
    """The word `task=...` for a name, a file's path, or several of them."""
    if isinstance(tasks, str | os.PathLike):
        chosen: Sequence[Any] = [tasks]
    elif isinstance(tasks, Sequence) and tasks and all(isinstance(task, str | os.PathLike) for task in tasks):
        chosen = tasks
    else:
        problems.append(
            f"tasks={shown(tasks)}: must be a task's name, the path of a YAML file, or a list of them; "
            "`python -m evalengine tasks` lists the names"
        )
        return []
    texts = [_quoted(os.fspath(task)) for task in chosen]
    return [f"task={texts[0]}" if len(texts) == 1 else f"task=[{','.join(texts)}]"]


def _text(value: Any, where: str, problems: list[str]) -> str | None:
    """The value in the grammar of overrides; None, and one more of `problems`, if it cannot be written so."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | os.PathLike):
        if is_text(where):
            cure = r'write "\n", neither "\\n" nor r"\n"; where the two are meant, double the backslash'
            problems.extend(escape_problems(os.fspath(value), where, cure))
        return _quoted(os.fspath(value))
    if isinstance(value, Mapping):
        inner = {str(key): _text(item, f"{where}.{key}", problems) for key, item in value.items()}
        return "{" + ",".join(f"{_quoted(key)}:{item}" for key, item in inner.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(filter(None, (_text(item, where, problems) for item in value)))}]"
    if (number := _number(value)) is not None:
        return number
    problems.append(f"{where}={shown(value)}: must be a text, a number, true or false, None, a list or a mapping")
    return None


def _number(value: Any) -> str | None:
    """An int or float, NumPy's too; None for anything else."""
    if hasattr(type(value), "__index__"):
        return str(int(value))
    return repr(float(value)) if isinstance(value, float) else None


def _quoted(text: str) -> str:
    """The text, quoted so that the grammar gives it back unchanged: `${...}` in it is no reference."""
    if _BARE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return str(QuotedString(literal, Quote.single).with_quotes())


def leaf_names(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaf_names(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"
