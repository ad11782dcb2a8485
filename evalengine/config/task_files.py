"""Finds tasks outside `conf/task/`: YAML files of the user's, classes of installed packages, and lm-eval's tasks.

    task=./my_task.yaml        a file anywhere, in lm-eval's names or with a `# @package tasks.NAME` line
    task=my_task               FOLDER/task/my_task.yaml below a folder of hydra.searchpath, in either form
    task=their_task            an entry point of the group `evalengine.tasks`: a Task class with `defaults`
    task=lm_eval/their_task    a task, group or tag of the installed lm-eval

Each becomes an entry of Hydra's config store, so that all else works as for a shipped task.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString

from evalengine.config.files import package_of, roots_of
from evalengine.config.kinds import TASK_NAME
from evalengine.config.task_outline import names_in
from evalengine.errors import ConfigError
from evalengine.util.plain_files import YAML_SUFFIXES, read_yaml

GROUP = "evalengine.tasks"  # the group of the entry points
LM_EVAL = "lm_eval/"  # the prefix of names of lm-eval's tasks, groups and tags


def with_task_files(parsed: Sequence[Override], conf: str, literal: Callable[[Any], Any]) -> list[str]:
    """The overrides' texts, with each task that is a file or an entry point replaced by its name in the store.

    conf: the package of the shipped configuration. literal: makes texts safe from OmegaConf's interpolation.
    Raises ConfigError for a file that is missing or cannot be used, and for two tasks of one name.
    """
    problems: list[str] = []
    texts = []
    for override in parsed:
        if override.key_or_group != "task" or override.is_delete():
            texts.append(str(override.input_line))
            continue
        chosen = override.value()
        stored = _Stored(roots_of(parsed, conf), literal, problems)
        if isinstance(chosen, ChoiceSweep):
            values = [stored.written(value) for value in chosen.list]
            text = f"task={','.join(values)}"
        else:
            text = f"task={stored.written(chosen)}"
        texts.append(text if stored.has_stored else str(override.input_line))
    if problems:
        raise ConfigError(problems)
    return texts


class _Stored:
    """Puts the tasks that one override names into the store, unless they are shipped files."""

    def __init__(self, roots: list[Path], literal: Callable[[Any], Any], problems: list[str]) -> None:
        self.has_stored = False  # whether a task was put into the store
        self._roots, self._literal, self._problems = roots, literal, problems

    def written(self, value: Any) -> str:
        """The value's text in an override, with the names in the store."""
        if not isinstance(value, list):
            return self._resolved(str(_plain(value)))[1]
        items = [str(_plain(item)) for item in value]
        resolved = {item: self._resolved(item) for item in items}
        if self.has_stored:
            self._refuse_namesakes(resolved)
        return f"[{','.join(resolved[item][1] for item in items)}]"

    def _resolved(self, chosen: str) -> tuple[list[str] | None, str]:
        """(the names of its tasks and groups or None if Hydra finds them; its name for Hydra)."""
        try:
            return self._stored(chosen) or (None, chosen)
        except ConfigError as error:
            self._problems.extend(f"task={chosen}: {problem.removeprefix(f'{chosen}: ')}" for problem in error.problems)
            return [], chosen

    def _refuse_namesakes(self, resolved: dict[str, tuple[list[str] | None, str]]) -> None:
        """Adds a problem for two choices with a task or group of one name: Hydra would make one task with the settings
        of both. Two shipped choices mean the same task by the same name."""
        seen: dict[str, str] = {}
        for chosen, (own, _) in resolved.items():
            if own is None:
                seen.update(dict.fromkeys([chosen, *names_in(chosen)], chosen))
        for chosen, (own, _) in resolved.items():
            taken = [name for name in own or [] if seen.setdefault(name, chosen) != chosen]
            if taken:
                name, others = taken[0], "" if len(taken) == 1 else f" (and {len(taken) - 1} more names)"
                cure = "choose one of them" if chosen.startswith(LM_EVAL) else "rename one of them"
                self._problems.append(f"task={chosen}: its name is {name}, as is task={seen[name]}'s{others}; {cure}")

    def _stored(self, chosen: str) -> tuple[list[str], str] | None:
        """(the names of the choice's tasks and groups, its name in the store); None if Hydra finds it itself."""
        if chosen.startswith(LM_EVAL):
            return self._of_lm_eval(chosen)
        if (file := self._file(chosen)) is not None:
            name, settings = read_file(file)
        elif (offered := _entry_point(chosen)) is not None and not self._shipped(chosen):
            name, settings = chosen, offered
        else:
            return None
        self.has_stored = True
        known_by = name if TASK_NAME.fullmatch(name) else "task"
        entry = f"{known_by}-{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"  # a sweep's runs are named after it
        node = self._literal(settings)
        ConfigStore.instance().store(name=entry, node=node, group="task", package=f"tasks.{name}", provider="own")
        return [name], entry

    def _of_lm_eval(self, chosen: str) -> tuple[list[str], str]:
        from evalengine.tasks.lm_eval_index import composed

        settings = composed(chosen.removeprefix(LM_EVAL))
        self.has_stored = True
        entry = f"lm_eval-{re.sub('[^A-Za-z0-9_-]', '_', chosen.removeprefix(LM_EVAL))}"
        node = self._literal(settings)
        ConfigStore.instance().store(name=entry, node=node, group="task", package="_global_", provider="own")
        return [*settings["tasks"], *settings["groups"]], entry

    def _file(self, chosen: str) -> Path | None:
        """The file that a name means; None if Hydra reads it by itself, or there is none."""
        path = Path(chosen).expanduser()
        if chosen.endswith(YAML_SUFFIXES) and ("/" in chosen or _is_file(path)):
            if not _is_file(path):
                near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.y*ml")], 2)
                raise ConfigError(f"no such file{f'; did you mean {near[0]}?' if near else ''}")
            return path
        for root in self._roots:
            for suffix in YAML_SUFFIXES:
                below = root / "task" / f"{chosen.removesuffix(suffix)}{suffix}"
                if _is_file(below) and _is_foreign(below):
                    return below
        return None

    def _shipped(self, chosen: str) -> bool:
        return any(_is_file(root / "task" / f"{chosen}.yaml") for root in self._roots)


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


def _is_foreign(file: Path) -> bool:
    """Whether the file is in lm-eval's names; a file that cannot be read is refused elsewhere."""
    from evalengine.tasks.lm_eval_yaml import is_lm_eval

    try:
        return package_of(file) is None and is_lm_eval(read_yaml(file, tags=True))
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or holds a null character
        return False


def _plain(value: Any) -> Any:
    return value.text if isinstance(value, QuotedString) else value


def _entry_point(name: str) -> dict[str, Any] | None:
    """The settings of the Task class that an installed package offers under this name. Raises ConfigError."""
    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    if entry is None:
        return None
    from evalengine.tasks.registry import class_defaults

    return {**asdict(class_defaults(entry.value, f"the entry point {GROUP} of {name}")), "cls": entry.value}


def offered() -> list[str]:
    """The names of the installed packages' tasks, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})
