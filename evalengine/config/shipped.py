"""The configuration files that come with the package, by group; listed without Hydra, so that help answers at once.

Hydra takes 20 ms for each file of a task (1.2 s for MMLU's 57, 4 s for all), so tasks and groups of `conf/task/` are
merged here, for runs and for listings. These files use three of Hydra's rules, and only these are built: `@package`,
`defaults` with `_self_`, and `@_here_` (tests/unit/test_task_outline.py compares the result with Hydra's).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.errors import ConfigError
from evalengine.util.plain_files import deep_merged, read_bytes, read_yaml

if TYPE_CHECKING:
    from evalengine.config.schema import Config

CONF = "evalengine.conf"
ONE_OF = ("model", "engine", "cluster", "experiment")  # groups of which a run has one: Hydra would mix several files
GROUPS = ("task", *ONE_OF)
PACKAGE = re.compile(r"#+\s*@package\s+(\S+)")


def available(group: str) -> list[str]:
    """The names of a configuration group ("task", "model", "engine"), sorted."""
    folder = files(CONF) / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def shipped_model(name: str) -> dict[str, Any] | None:
    """The settings of `conf/model/<name>.yaml`; None for a text that names no such file.

    Raises ConfigError if a folder or file here has the same name: which of the two models is meant is not guessed.
    """
    if name not in available("model"):
        return None
    settings: dict[str, Any] = read_yaml(Path(str(files(CONF) / "model" / f"{name}.yaml")))
    if Path(name).exists():
        raise ConfigError(
            f"model={name}: is the name of a model that comes with the package, and of {Path(name).resolve()}; write "
            f"./{name} for that, or {settings['path']} for the other"
        )
    return settings


def package_of(path: Path) -> str | None:
    """The package that the file's `@package` line names. Hydra reads that line only if it precedes all other lines,
    comments included."""
    for line in filter(str.strip, read_bytes(path).decode().splitlines()):
        if not re.match(r"\s*#\s*@", line):
            return None
        if match := PACKAGE.match(line.strip()):
            return match[1]
    return None


def outline(name: str) -> Config:
    """The configuration of `task=NAME` for a shipped task or group, with only the settings that task files set."""
    from evalengine.config.schema import Config  # pydantic takes long to import
    from evalengine.util.validation import read_as

    return read_as(Config, settings_in(name))


def settings_in(name: str) -> dict[str, Any]:
    """The settings of a shipped task or group and of the files that it names, as a mapping from the root."""
    tree: dict[str, Any] = {}
    for package, content in _contents(_file(name), None):
        for part in () if package == "_global_" else reversed(package.split(".")):
            content = {part: content}
        tree = deep_merged(tree, content)
    return tree


def names_in(name: str) -> list[str]:
    """The names of the tasks and groups that `task=NAME` chooses; none if NAME is no shipped file."""
    tree = settings_in(name) if _file(name).is_file() else {}
    return [*tree.get("tasks", ()), *tree.get("groups", ())]


def _file(name: str) -> Path:
    bare = re.sub(r"\.ya?ml$", "", name)
    return Path(str(files(CONF))) / "task" / f"{bare}.yaml"


def _contents(file: Path, here: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(package, settings) of the file and of the files that it names; each overrides those before it."""
    package, content = _read(file)
    own = here or package or "task"
    defaults = content.get("defaults", [])
    for entry in [*defaults, *([] if "_self_" in defaults else ["_self_"])]:
        if entry == "_self_":
            yield own, {key: value for key, value in content.items() if key != "defaults"}
            continue
        place, _, where = entry.partition("@")
        below = _file(place.removeprefix("/task/"))
        yield from _contents(below, own if where == "_here_" else None)


@lru_cache(None)  # several groups name the subjects of MMLU
def _read(file: Path) -> tuple[str | None, dict[str, Any]]:
    return package_of(file), read_yaml(file) or {}
