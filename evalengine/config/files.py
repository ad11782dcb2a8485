"""Checks the configuration files that a user's overrides name, before Hydra reads them.

Hydra shows a traceback for a YAML mistake and expands aliases until the memory ends; and a task's file without its
`# @package` line becomes settings of all tasks instead of a task, in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString

from evalengine.errors import ConfigError
from evalengine.util.plain_files import read_yaml

ONE_OF = ("model", "engine", "cluster")  # groups of which a run has one: Hydra would mix the files of several
GROUPS = ("task", *ONE_OF, "experiment")
NEED_SETTINGS = {  # group -> what its files must hold
    "task": "a task's file names its class, dataset and prompts (docs/tasks.md)",
    "experiment": "an experiment's file names the settings that it sweeps (CONTRIBUTING.md, 'Adding an experiment')",
}
PACKAGE = re.compile(r"#+\s*@package\s+(\S+)")


def check_files(parsed: Sequence[Override], conf: str) -> None:
    """Checks the files that the overrides choose, the files that these choose in turn, and so on.

    conf: the package of the shipped configuration. Raises `ConfigError` for files that are no mapping in YAML or belong
    to no task. Hydra refuses a name without a file.
    """
    roots = roots_of(parsed, conf)
    chosen = [(o.key_or_group, name) for o in parsed if o.key_or_group in GROUPS for name in _names(o.value())]
    seen: set[Path] = set()
    problems = []
    while chosen:
        group, name = chosen.pop()
        for root in roots:
            path = root / group / (name if name.endswith(".yaml") else f"{name}.yaml")
            if path in seen or not _exists(path):
                continue
            seen.add(path)
            try:
                content = _content(path, group, name)
            except (OSError, ValueError) as error:
                problems.append(f"{group}={name}: {path}: {error}")
                continue
            chosen.extend((place, n) for place, names in _chosen(content.get("defaults", []), group) for n in names)
    if problems:
        raise ConfigError(problems)


def roots_of(parsed: Sequence[Override], conf: str) -> list[Path]:
    """The folders whose groups can be chosen from: the shipped one, and those of hydra.searchpath."""
    return [Path(str(files(conf))), *_searched(parsed)]


def _searched(parsed: Sequence[Override]) -> Iterator[Path]:
    """The folders of hydra.searchpath."""
    for override in parsed:
        if override.key_or_group == "hydra.searchpath":
            for place in _names(override.value()):
                if place.startswith("file:"):
                    yield Path(unquote(urlparse(place).path))


def _names(value: Any) -> list[str]:
    """The texts of an override's value, whether one, a list or a sweep."""
    if isinstance(value, ChoiceSweep):
        value = value.list
    if isinstance(value, (list, tuple)):
        return [name for inner in value for name in _names(inner)]
    if isinstance(value, QuotedString):
        value = value.text
    return [value] if isinstance(value, str) else []


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # the name is too long, or holds a null character
        return False


def _content(path: Path, group: str, name: str) -> dict[str, Any]:
    """The file's settings. Raises OSError, or ValueError saying what is wrong with them."""
    content = read_yaml(path)
    if content is None and group in NEED_SETTINGS:
        raise ValueError(f"it is empty; {NEED_SETTINGS[group]}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("must hold settings, name: value, a line each")
    if wrong := [key for key in content if not isinstance(key, str)]:
        raise ValueError(f"{str(wrong[0])[:40]!r} is no name of a setting")
    if not _are_names(content.get("defaults", [])):
        raise ValueError("its defaults must be a list of names, each a text or a group with its names")
    for place, names in _chosen(content.get("defaults", []), group):
        if place in ONE_OF and len(names) > 1:
            raise ValueError(f"its defaults choose {', '.join(names)} as {place}; a run has one {place}")
    package = package_of(path)
    if group == "task" and {*content} - {"defaults"} and not re.fullmatch(r"tasks\..+|_global_", package or ""):
        said = f"says '# @package {package}'" if package else "has no '# @package' line"
        raise ValueError(f"it {said}, so its settings belong to no task; begin it with '# @package tasks.{name}'")
    if group == "experiment" and package != "_global_":
        said = f"says '# @package {package}'" if package else "has no '# @package' line"
        raise ValueError(f"it {said}; begin it with '# @package _global_', since an experiment sets others' settings")
    return content


def _are_names(defaults: Any) -> bool:
    if not isinstance(defaults, list):
        return False
    values = [value for entry in defaults for value in (entry.values() if isinstance(entry, dict) else [entry])]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return all(text is None or isinstance(text, str) for text in texts)


def package_of(path: Path) -> str | None:
    """The package that the file's `@package` line names. Hydra reads that line only if it precedes all other lines,
    comments included."""
    for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
        if not re.match(r"\s*#\s*@", line):
            return None
        if match := PACKAGE.match(line.strip()):
            return match[1]
    return None


def _chosen(entries: list[Any], group: str) -> Iterator[tuple[str, list[str]]]:
    """(group, names of its files) for each entry of a defaults list."""
    for entry in entries:
        for key, value in entry.items() if isinstance(entry, dict) else [(None, entry)]:
            if key is None:
                place, _, name = str(value).rpartition("/")
                yield _absolute(place, group), [name.partition("@")[0]]
                continue
            place = re.sub(r"^((override|optional)\s+)+", "", str(key)).partition("@")[0].strip()
            yield _absolute(place, group), _names(value)


def _absolute(place: str, group: str) -> str:
    if place.startswith("/"):
        return place.strip("/")
    return f"{group}/{place}".strip("/")
