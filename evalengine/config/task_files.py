"""Tasks outside `conf/task/`: YAML files of the user's, classes of installed packages, and lm-eval's tasks.

task=./my_task.yaml        a file anywhere, in lm-eval's names or with a `# @package tasks.NAME` line
task=my_task               FOLDER/task/my_task.yaml below a folder of hydra.searchpath, in either form
task=their_task            an entry point of the group `evalengine.tasks`: a Task class with `defaults`
task=lm_eval/their_task    a task, group or tag of the installed lm-eval
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from evalengine.config.shipped import names_in, package_of
from evalengine.errors import ConfigError
from evalengine.util.plain_files import YAML_SUFFIXES, read_yaml

GROUP = "evalengine.tasks"  # the group of the entry points
LM_EVAL = "lm_eval/"  # the prefix of names of lm-eval's tasks, groups and tags


def is_elsewhere(name: str) -> bool:
    """Whether the name is lm-eval's, or a path, and so means no file in Hydra's folders."""
    return name.startswith(LM_EVAL) or (name.endswith(YAML_SUFFIXES) and ("/" in name or is_file(Path(name))))


def is_file(path: Path) -> bool:
    """Whether there is something to read. False for names that are too long, or hold a null character."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def offered() -> list[str]:
    """The names of the installed packages' tasks, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def tasks_elsewhere(name: str) -> dict[str, Any]:
    """`tasks` and `groups` of a choice that `is_elsewhere` or is offered. Raises ConfigError if it cannot be used."""
    if name.startswith(LM_EVAL):
        from evalengine.tasks.lm_eval_index import composed

        return _literal(composed(name.removeprefix(LM_EVAL)))
    if is_elsewhere(name):
        path = Path(name).expanduser()
        if not is_file(path):
            near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.y*ml")], 2)
            raise ConfigError(f"no such file{f'; did you mean {near[0]}?' if near else ''}")
        return _literal(_tasks_in(path))
    from evalengine.tasks.registry import class_defaults

    (entry, *_) = entry_points(group=GROUP, name=name)
    settings = asdict(class_defaults(entry.value, f"the entry point {GROUP} of {name}"))
    return _literal({"tasks": {name: {**settings, "cls": entry.value}}})


def in_lm_eval_names(file: Path) -> dict[str, Any] | None:
    """`tasks` and `groups` of a file in lm-eval's names; None for any other. Raises ConfigError if it is unusable."""
    from evalengine.tasks.lm_eval_yaml import is_lm_eval

    if package_of(file) is not None or not is_lm_eval(read_yaml(file, tags=True)):
        return None
    return _literal(_tasks_in(file))


def _tasks_in(file: Path) -> dict[str, Any]:
    """`tasks`, and `groups` if it is a group of lm-eval's form, of a YAML file. Raises ConfigError."""
    from evalengine.tasks.lm_eval_group import is_group, read_group

    try:
        group = package_of(file) is None and is_group(read_yaml(file, tags=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return read_group(file) if group else {"tasks": dict([read_file(file)])}


def read_file(file: Path) -> tuple[str, dict[str, Any]]:
    """(the task's name, its settings) of a YAML file in either form. Raises ConfigError."""
    try:
        package, content = package_of(file), read_yaml(file, tags=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if package is None or not package.startswith("tasks."):
        from evalengine.tasks.lm_eval_yaml import read_task

        return read_task(file)
    if not isinstance(content, dict) or "defaults" in content:
        raise ConfigError(
            f"{file}: must hold a task's settings and no defaults; a list of tasks is chosen by name, from a folder of "
            "hydra.searchpath"
        )
    return package.removeprefix("tasks."), content


def namesakes(chosen: Sequence[str], own: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A sentence for two choices with a task or group of one name: Hydra would make one task with the settings of both.
    Two shipped choices mean the same task by the same name. own: the names of each choice that is not shipped."""
    shipped = [choice for choice in chosen if choice not in own]
    seen = {name: choice for choice in shipped for name in (choice, *names_in(choice))}
    for choice in dict.fromkeys(choice for choice in chosen if choice in own):
        taken = [name for name in own[choice] if seen.setdefault(name, choice) != choice]
        if taken:
            name, others = taken[0], "" if len(taken) == 1 else f" (and {len(taken) - 1} more names)"
            cure = "choose one of them" if choice.startswith(LM_EVAL) else "rename one of them"
            yield f"task={choice}: its name is {name}, as is task={seen[name]}'s{others}; {cure}"


def _literal(written: Any) -> Any:
    """The values with texts escaped so that OmegaConf gives them back unchanged: a prompt's `${...}` is no reference,
    and no file reads the environment."""
    if isinstance(written, dict):
        return {key: _literal(value) for key, value in written.items()}
    if isinstance(written, list):
        return [_literal(value) for value in written]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", written) if isinstance(written, str) else written
