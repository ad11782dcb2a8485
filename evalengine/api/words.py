"""Python's arguments as words of the command line, so that both ask for a run in one way and by one code.

{"limit": 8, "engine": {"max_num_seqs": 4}}    ->    limit=8 engine.max_num_seqs=4
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from evalengine.arguments import shown

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_/-]*")  # needs no quotes, unless it is a word of the grammar
_WORDS = ("null", "true", "false", "inf", "nan")
_NAME = re.compile(r"[A-Za-z_][\w./-]*")  # of a setting


def words(settings: Mapping[str, Any], problems: list[str], above: str = "") -> list[str]:
    """A word for each setting, those of a mapping by their dotted names. What is no setting's name or value goes into
    `problems`, a sentence each."""
    found: list[str] = []
    for name, value in settings.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{above}{shown(name)}: must be a setting's name")
        elif isinstance(value, Mapping) and value:
            found += words(value, problems, f"{above}{name}.")
        else:
            text = _text(value, f"{above}{name}", problems)
            found += [] if text is None else [f"{above}{name}={text}"]
    return found


def task_word(tasks: Any, problems: list[str]) -> list[str]:
    """`task=...` of a name, a file's path, or several of them."""
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
    """The value in the grammar of overrides; None, and a problem, for what cannot be one."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | os.PathLike):
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
    """A text that the grammar gives back as it is: `${...}` in it is no reference."""
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
