"""Python's arguments as settings by their dotted names, and as the command line's words, by which a run records them.

{"limit": 8, "engine": {"max_num_seqs": 4}} -> {"limit": 8, "engine.max_num_seqs": 4} -> limit=8 engine.max_num_seqs=4
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evalengine.config.arguments import integer, number, shown
from evalengine.config.texts import escape_problems, is_text
from evalengine.config.words import word

_NAME = re.compile(r"[A-Za-z_][\w./-]*")  # a setting's name
_CURE = r'write "\n", neither "\\n" nor r"\n"; where the two are meant, double the backslash'


def flat(settings: Mapping[str, Any], problems: list[str], above: str = "") -> dict[str, Any]:
    """The settings by their dotted names, with plain values: paths are texts, tuples lists, NumPy's numbers Python's.
    Each bad name or value, and what is given twice, adds a sentence to `problems`."""
    read: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{above}{shown(name)}: must be a setting's name")
            continue
        name = f"{above}{_in_full(name, value) if not above else name}"
        above_others = isinstance(value, Mapping) and not name.endswith("judge.scale")  # whose keys are labels
        one = flat(value, problems, f"{name}.") if above_others else {name: plain(value, name, problems)}
        problems.extend(f"{twice}: is given twice" for twice in read.keys() & one.keys())
        read |= one
    return read


def _in_full(name: str, value: Any) -> str:
    """The name, of which some stand for longer ones as on the command line."""
    if name == "cache" and not isinstance(value, Mapping):
        return "cache.path"
    return "task.judge" if name == "judge" else name


def plain(value: Any, where: str, problems: list[str]) -> Any:
    """The value as YAML can hold it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        problems.extend(escape_problems(text, where, _CURE) if is_text(where) else ())
        return text
    if isinstance(value, Mapping):
        return {str(key): plain(item, where, problems) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, problems) for item in value]
    if (read := integer(value) if integer(value) is not None else number(value)) is None:
        problems.append(f"{where}={shown(value)}: must be a text, a number, true or false, None, a list or a mapping")
    return read


def task_word(tasks: Any, problems: list[str]) -> list[str]:
    """The word `task=...` for a name, a file's path, or several of them."""
    chosen = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
    if not (isinstance(chosen, Sequence) and chosen and all(isinstance(task, str | os.PathLike) for task in chosen)):
        problems.append(
            f"tasks={shown(tasks)}: must be a task's name, the path of a YAML file, or a list of them; "
            "`python -m evalengine tasks` lists the names"
        )
        return []
    texts = [os.fspath(task) for task in chosen]
    return [word("task", texts[0] if len(texts) == 1 else texts)]
