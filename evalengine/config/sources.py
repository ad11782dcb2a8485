"""Where Hydra finds configuration files: the shipped folder, the user's folders, and tasks of other kinds.

Hydra's own sources show a traceback for a YAML mistake, expand aliases until the memory ends, and take a task's file
without its `# @package` line as settings of all tasks, in silence. These are sources such as Hydra lets anyone add: a
file is read and checked where Hydra asks for it, and what is wrong is kept, for all of it to be said at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from evalengine.config.shipped import CONF, ONE_OF, package_of
from evalengine.config.task_files import in_lm_eval_names, is_elsewhere, is_file, offered, tasks_elsewhere
from evalengine.errors import ConfigError
from evalengine.util.plain_files import YAML_SUFFIXES, read_yaml

NEED_SETTINGS = {  # group -> what its files must hold
    "task": "a task's file names its class, dataset and prompts (docs/tasks.md)",
    "experiment": "an experiment's file names the settings that it sweeps (CONTRIBUTING.md, 'Adding an experiment')",
}


class Source(ConfigSource):
    """A source of Hydra's: `settings` gives the package and the settings of a file."""

    problems: ClassVar[list[str]] = []  # of the files that Hydra asked for
    chosen: ClassVar[list[str]] = []  # the tasks that the overrides choose
    own: ClassVar[dict[str, list[str]]] = {}  # a choice that is no shipped task -> the names of its tasks and groups

    def settings(self, group: str, name: str) -> tuple[str | None, dict[str, Any]]:
        """(the package, the settings). Raises OSError, or ValueError saying what is wrong with them."""
        raise NotImplementedError

    def load_config(self, config_path: str) -> ConfigResult:
        group, name = config_path.split("/", 1) if "/" in config_path else ("", config_path)
        try:
            package, content = self.settings(group, name)
        except (OSError, ValueError) as error:  # a ConfigError among them
            said = error.problems if isinstance(error, ConfigError) else [str(error)]
            self.problems.extend(f"{group}={name}: {problem.removeprefix(f'{name}: ')}" for problem in said)
            package, content = "_global_", {}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), {"package": package})

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class Folder(Source):
    """A folder of groups: evalengine://FOLDER."""

    @staticmethod
    def scheme() -> str:
        return "evalengine"

    def settings(self, group: str, name: str) -> tuple[str | None, dict[str, Any]]:
        path = self._file(f"{group}/{name}".lstrip("/"))
        assert path is not None, "Hydra asks for what is_config says is there"
        try:
            if group == "task" and (content := in_lm_eval_names(path)) is not None:
                self.own[name] = [*content["tasks"], *content.get("groups", {})]
                return "_global_", content
            package = package_of(path)
            is_part = "/" in name and name not in self.chosen  # included in a task's file, it needs no package
            return package, _checked(read_yaml(path), package, "" if is_part else group, name)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return sorted(file.stem for file in Path(self.path, config_path).glob("*.yaml"))

    def _file(self, config_path: str) -> Path | None:
        group, _, name = config_path.partition("/")
        if group == "task" and is_elsewhere(name):
            return None
        bare = re.sub(r"\.ya?ml$", "", config_path)
        return next((path for suffix in YAML_SUFFIXES if is_file(path := Path(self.path, f"{bare}{suffix}"))), None)


class Tasks(Source):
    """Tasks that are files anywhere, of installed packages, or lm-eval's: evalengine-tasks://."""

    @staticmethod
    def scheme() -> str:
        return "evalengine-tasks"

    def settings(self, group: str, name: str) -> tuple[str | None, dict[str, Any]]:
        content = tasks_elsewhere(name)
        self.own[name] = [*content["tasks"], *content.get("groups", {})]
        return "_global_", content

    def is_group(self, config_path: str) -> bool:
        return config_path == "task"

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        return group == "task" and (is_elsewhere(name) or name in offered())


class Places(SearchPathPlugin):
    """The shipped folder, which is searched first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("main", f"evalengine://{files(CONF)}")


@lru_cache(None)  # Hydra looks for plugins at the first call
def register() -> None:
    """Tells Hydra of these sources."""
    for plugin in (Folder, Tasks, Places):
        Plugins.instance().register(plugin)


def searched(folders: Sequence[str]) -> list[str]:
    """The user's folders as sources, and behind them tasks of other kinds."""
    return [*(re.sub(r"^(file://)?(?=/)", "evalengine://", folder) for folder in folders), "evalengine-tasks://"]


def _checked(content: Any, package: str | None, group: str, name: str) -> dict[str, Any]:
    """The file's settings. Raises ValueError saying what is wrong with them."""
    if content is None and group in NEED_SETTINGS:
        raise ValueError(f"it is empty; {NEED_SETTINGS[group]}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("must hold settings, name: value, a line each")
    if wrong := [key for key in content if not isinstance(key, str)]:
        raise ValueError(f"{str(wrong[0])[:40]!r} is no name of a setting")
    if not _are_names(defaults := content.get("defaults", [])):
        raise ValueError("its defaults must be a list of names, each a text or a group with its names")
    for place, names in _several(defaults):
        raise ValueError(f"its defaults choose {', '.join(names)} as {place}; a run has one {place}")
    said = f"says '# @package {package}'" if package else "has no '# @package' line"
    if group == "task" and {*content} - {"defaults"} and not re.fullmatch(r"tasks\..+|_global_", package or ""):
        raise ValueError(f"it {said}, so its settings belong to no task; begin it with '# @package tasks.{name}'")
    if group == "experiment" and package != "_global_":
        raise ValueError(f"it {said}; begin it with '# @package _global_', since an experiment sets others' settings")
    return content


def _are_names(defaults: Any) -> bool:
    if not isinstance(defaults, list):
        return False
    values = [value for entry in defaults for value in (entry.values() if isinstance(entry, dict) else [entry])]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return all(text is None or isinstance(text, str) for text in texts)


def _several(defaults: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """(group, names) where a defaults list chooses several files of a group of which a run has one."""
    for entry in defaults:
        for key, names in entry.items() if isinstance(entry, dict) else ():
            place = re.sub(r"^((override|optional)\s+)+", "", str(key)).partition("@")[0].strip(" /")
            if place in ONE_OF and isinstance(names, list) and len(names) > 1:
                yield place, names
