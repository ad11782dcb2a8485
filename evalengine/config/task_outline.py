"""Reads the tasks and groups of `conf/task/` without Hydra, for listings that need names and settings but no run.

Hydra takes 20 ms to compose a task (4 s for the 200 shipped ones), since it checks each against the schema and merges
it with everything else. The shipped files use three of Hydra's rules, and only these are built here: `@package`,
`defaults` with `_self_`, and `@_here_` (tests/unit/test_task_outline.py compares the result with Hydra's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config
from evalengine.config.shipped import CONF, package_of
from evalengine.config.typed import read_as
from evalengine.util.plain_files import read_yaml


def outline(name: str) -> Config:
    """The configuration of `task=NAME` for a shipped task or group, with only the settings that task files set."""
    tree: dict[str, Any] = {}
    for package, content in _contents(_file(name), None):
        node = tree
        for part in () if package == "_global_" else package.split("."):
            node = node.setdefault(part, {})
        _merge(node, content)
    return read_as(Config, tree)


def names_in(name: str) -> list[str]:
    """The names of the tasks and groups that `task=NAME` chooses; none if NAME is no shipped file."""
    if not _file(name).is_file():
        return []
    config = outline(name)
    return [*config.tasks, *config.groups]


def _file(name: str) -> Path:
    return Path(str(files(CONF))) / "task" / f"{name}.yaml"


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


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Puts `over`'s settings into `under`; mappings are merged, anything else is replaced."""
    for key, value in over.items():
        if isinstance(value, dict):
            if not isinstance(under.get(key), dict):
                under[key] = {}
            _merge(under[key], value)
        else:
            under[key] = value
