"""Where Hydra finds configuration files: the shipped folder, the user's folders, and tasks of other kinds.

task=./my_task.yaml        a file anywhere, in lm-eval's names or with a `# @package tasks.NAME` line
task=my_task               FOLDER/task/my_task.yaml below a folder of hydra.searchpath, in either form
task=their_task            an entry point of the group `evalengine.tasks`: a Task class with `defaults`
task=lm_eval/their_task    a task, group or tag of the installed lm-eval

Hydra's own sources show a traceback for a YAML mistake, expand aliases until the memory ends, and take a task's file
without its `# @package` line as settings of all tasks, in silence. These are sources such as Hydra lets anyone add: a
file is read and checked when Hydra requests it, and what is wrong is collected, for one list of problems.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from evalengine.config.shipped import CONF, names_in, package_of, settings_in
from evalengine.errors import ConfigError
from evalengine.util.plain_files import YAML_SUFFIXES, read_yaml
from evalengine.util.plugins import load

MERGED = str(files(CONF))  # the folder whose tasks are merged by `settings_in`
GROUP = "evalengine.tasks"  # the group of the entry points
LM_EVAL = "lm_eval/"  # the prefix of names of lm-eval's tasks, groups and tags
COMPOSED = "evalengine.integrations.lm_eval_tasks.index:composed"
READ_GROUP = "evalengine.integrations.lm_eval_tasks.group:read_group"
PACKAGES = {"task": r"tasks\..+|_global_", "experiment": "_global_"}  # group -> what a file's package must be


class Source(ConfigSource):
    """`evalengine://FOLDER`: a folder of groups; `evalengine://`: tasks that are files anywhere, of installed packages,
    or lm-eval's."""

    problems: ClassVar[list[str]] = []  # of the files that Hydra requested
    chosen: ClassVar[list[str]] = []  # the tasks that the overrides choose
    own: ClassVar[dict[str, list[str]]] = {}  # a choice that is no shipped task -> the names of its tasks and groups

    @staticmethod
    def scheme() -> str:
        return "evalengine"

    def load_config(self, config_path: str) -> ConfigResult:
        group, name = config_path.split("/", 1) if "/" in config_path else ("", config_path)
        try:
            package, content = self.settings(group, name)
        except (OSError, ValueError) as error:  # a ConfigError among them
            said = error.problems if isinstance(error, ConfigError) else [str(error)]
            self.problems.extend(f"{group}={name}: {problem.removeprefix(f'{name}: ')}" for problem in said)
            package, content = "_global_", {}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), {"package": package})

    def settings(self, group: str, name: str) -> tuple[str | None, dict[str, Any]]:
        """(the package, the settings). Raises OSError, or ValueError saying what is wrong with them."""
        if not self.path:
            return "_global_", self.of_tasks(name, _tasks_elsewhere(name))
        path = self._file(f"{group}/{name}".lstrip("/"))
        assert path is not None, "Hydra requests what is_config reports"
        try:
            package = package_of(path)
            if group == "task" and package is None:
                from evalengine.tasks.lm_eval_yaml import is_lm_eval

                if is_lm_eval(read_yaml(path, tags=True)):
                    return "_global_", self.of_tasks(name, _tasks_in(path))
            if group == "task" and package is not None and self.path == MERGED:
                content = settings_in(name)  # Hydra takes 1.2 s for a group of 57 files, and this 0.2 s
                for part in () if package == "_global_" else package.split("."):
                    content = content[part]
                return package, content
            is_part = "/" in name and name not in self.chosen  # included in a task's file, it needs no package
            return package, _checked(read_yaml(path), package, "" if is_part else group, name)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def of_tasks(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of tasks and groups that a choice adds, as OmegaConf gives them back unchanged."""
        self.own[name] = [*content["tasks"], *content.get("groups", {})]
        settings: dict[str, Any] = _literal(content)
        return settings

    def available(self) -> bool:
        return not self.path or Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir() if self.path else config_path == "task"

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        if group == "task" and _is_elsewhere(name):
            return not self.path
        return self._file(config_path) is not None if self.path else group == "task" and name in offered()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return sorted(file.stem for file in Path(self.path, config_path).glob("*.yaml")) if self.path else []

    def _file(self, config_path: str) -> Path | None:
        bare = re.sub(r"\.ya?ml$", "", config_path)
        return next((path for suffix in YAML_SUFFIXES if _is_file(path := Path(self.path, f"{bare}{suffix}"))), None)


class Places(SearchPathPlugin):
    """Has `Source` read the shipped folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.path == MERGED:
                element.path = f"evalengine://{MERGED}"


@lru_cache(None)  # Hydra looks for plugins at the first call
def register() -> None:
    """Adds these plugins to Hydra's."""
    for plugin in (Source, Places):
        Plugins.instance().register(plugin)


def searched(folders: Sequence[str]) -> list[str]:
    """The user's folders as sources, and behind them tasks of other kinds."""
    return [*(re.sub(r"^(file://)?(?=/)", "evalengine://", folder) for folder in folders), "evalengine://"]


def offered() -> list[str]:
    """The names of the installed packages' tasks, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def namesakes(chosen: Sequence[str], own: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A sentence for two choices with a task or group of one name: Hydra would make one task with the settings of both.
    Two shipped choices mean the same task by the same name. own: the names of each choice that is not shipped."""
    shipped = [choice for choice in chosen if choice not in own and not _is_elsewhere(choice)]
    seen = {name: choice for choice in shipped for name in (choice, *names_in(choice))}
    for choice in dict.fromkeys(choice for choice in chosen if choice in own):
        taken = [name for name in own[choice] if seen.setdefault(name, choice) != choice]
        if taken:
            name, others = taken[0], "" if len(taken) == 1 else f" (and {len(taken) - 1} more names)"
            fix = "choose one of them" if choice.startswith(LM_EVAL) else "rename one of them"
            yield f"task={choice}: its name is {name}, as is task={seen[name]}'s{others}; {fix}"


def _is_elsewhere(name: str) -> bool:
    """Whether the name is lm-eval's, or a path, and so means no file in Hydra's folders."""
    return name.startswith(LM_EVAL) or (name.endswith(YAML_SUFFIXES) and ("/" in name or _is_file(Path(name))))


def _is_file(path: Path) -> bool:
    """Whether there is something to read. False for names that are too long, or hold a null character."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def _tasks_elsewhere(name: str) -> dict[str, Any]:
    """`tasks` and `groups` of a choice that is no file of a folder. Raises ConfigError if it cannot be used."""
    if name.startswith(LM_EVAL):
        theirs: dict[str, Any] = load(COMPOSED)(name.removeprefix(LM_EVAL))
        return theirs
    if _is_elsewhere(name):
        path = Path(name).expanduser()
        if not _is_file(path):
            near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.y*ml")], 2)
            raise ConfigError(f"no such file{f'; did you mean {near[0]}?' if near else ''}")
        return _tasks_in(path)
    from evalengine.tasks.registry import class_defaults

    (entry, *_) = entry_points(group=GROUP, name=name)
    settings = asdict(class_defaults(entry.value, f"the entry point {GROUP} of {name}"))
    return {"tasks": {name: {**settings, "cls": entry.value}}}


def _tasks_in(file: Path) -> dict[str, Any]:
    """`tasks`, and `groups` if it is a group of lm-eval's form, of a YAML file in either form. Raises ConfigError."""
    from evalengine.tasks.lm_eval_yaml import is_group, read_task

    try:
        package, content = package_of(file), read_yaml(file, tags=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if package is None and is_group(content):
        members: dict[str, Any] = load(READ_GROUP)(file)
        return members
    if package is None or not package.startswith("tasks."):
        return {"tasks": dict([read_task(file)])}
    if not isinstance(content, dict) or "defaults" in content:
        raise ConfigError(
            f"{file}: must hold a task's settings and no defaults; a list of tasks is chosen by name, from a folder of "
            "hydra.searchpath"
        )
    return {"tasks": {package.removeprefix("tasks."): content}}


def _literal(written: Any) -> Any:
    """The values with texts escaped so that OmegaConf gives them back unchanged: a prompt's `${...}` is no reference,
    and no file reads the environment."""
    if isinstance(written, dict):
        return {key: _literal(value) for key, value in written.items()}
    if isinstance(written, list):
        return [_literal(value) for value in written]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", written) if isinstance(written, str) else written


def _checked(content: Any, package: str | None, group: str, name: str) -> dict[str, Any]:
    """The file's settings. Raises ValueError saying what is wrong with them."""
    if content is None and group in PACKAGES:
        raise ValueError("it is empty")
    if not isinstance(content, dict | None):
        raise ValueError("must hold settings, name: value, a line each")
    settings: dict[str, Any] = content or {}
    wanted = PACKAGES.get(group, ".*") if group == "experiment" or {*settings} - {"defaults"} else ".*"
    if not re.fullmatch(wanted, package or ""):
        said = f"says '# @package {package}'" if package else "has no '# @package' line"
        line = "_global_" if group == "experiment" else f"tasks.{name}"
        raise ValueError(f"it {said}, so its settings would go elsewhere; begin it with '# @package {line}'")
    return settings
