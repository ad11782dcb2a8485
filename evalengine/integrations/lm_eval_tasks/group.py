"""A group's YAML file in lm-evaluation-harness's names (0.4.13) -> our `tasks` and `groups`.

    group: capitals_and_science
    task: [capitals, arc_easy, {group: inner, task: [boolq]}]
    aggregate_metric_list: [{metric: acc, weight_by_size: true}]

A member is the task of a YAML file in the same folder, by its `task:`, or else a task, group or tag of the installed
lm-eval, as in lm-eval with the file's folder as `--include_path`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalengine.config.schema import GroupConfig
from evalengine.errors import ConfigError
from evalengine.integrations.lm_eval_tasks.index import composed, plain_name
from evalengine.tasks.lm_eval_yaml import is_group, read_task
from evalengine.util.plain_files import YAML_SUFFIXES, read_yaml

KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag")


def read_group(file: Path) -> dict[str, Any]:
    """`tasks` and `groups` of a configuration. Raises ConfigError for everything that cannot be used."""
    content = read_yaml(file, tags=True)
    if problems := [*_problems(content)]:
        raise ConfigError([f"{file}: {problem}" for problem in problems])
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    _add(content, _siblings(file), tasks, groups)
    return {"tasks": tasks, "groups": groups}


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    name, members = content.get("group"), content.get("task")
    if not isinstance(name, str) or not name:
        yield "group: must be the group's name"
        return
    if unknown := [str(key) for key in content if key not in KEYS]:
        yield f"group {name}: {', '.join(unknown)} (no such key of a group; there are {', '.join(KEYS)})"
    if not isinstance(content.get("metadata") or {}, dict):
        yield f"group {name}: metadata: must hold settings"
    if not isinstance(members, list) or not members:
        yield f"group {name}: task: must list the group's tasks"
        return
    for member in members:
        if is_group(member):
            yield from _problems(member)
        elif not isinstance(member, str):
            yield (
                f"group {name}: task: {str(member)[:60]} changes a task's settings within the group, which is not "
                "built; write a YAML file next to this one that includes the task's file, and name its task here"
            )


def _siblings(file: Path) -> dict[str, Path]:
    """Task -> its YAML file in the folder of the group's file."""
    found: dict[str, Path] = {}
    for other in sorted(path for path in file.parent.iterdir() if path.suffix in YAML_SUFFIXES and path.is_file()):
        try:
            content = read_yaml(other, tags=True)
        except (OSError, ValueError):
            continue  # files of other kinds may lie there
        if isinstance(content, dict) and not is_group(content) and isinstance(content.get("task"), str):
            found.setdefault(content["task"], other)
    return found


def _add(
    content: Mapping[str, Any], siblings: Mapping[str, Path], tasks: dict[str, Any], groups: dict[str, Any]
) -> str:
    """Adds a group and all its members; returns its name."""
    name, metadata = plain_name(content["group"]), content.get("metadata") or {}
    if name in groups:
        raise ConfigError(f"group {name}: is in the file twice; rename one of the two")
    groups[name] = {}  # reserves the group's place before the groups within it
    children: dict[str, None] = {}
    for member in content["task"]:
        if is_group(member):
            children[_add(member, siblings, tasks, groups)] = None
        elif member in siblings:
            task, settings = read_task(siblings[member])
            _put({task: settings}, tasks, member)
            children[task] = None
        else:
            children.update(dict.fromkeys(_of_lm_eval(member, tasks, groups)))
    group = GroupConfig(tasks=[*children], alias=content.get("group_alias"), version=metadata.get("version"))
    groups[name] = {**asdict(group), "aggregate_metric_list": content.get("aggregate_metric_list")}
    return name


def _of_lm_eval(name: str, tasks: dict[str, Any], groups: dict[str, Any]) -> list[str]:
    """Adds what lm-eval has under the name; returns what the group then contains."""
    try:
        found = composed(name)
    except ConfigError as error:
        raise ConfigError([f"task: {name}: {problem}" for problem in error.problems]) from error
    _put(found["tasks"], tasks, name)
    _put(found["groups"], groups, name)
    return [plain_name(name)] if plain_name(name) in found["groups"] else [*found["tasks"]]


def _put(found: Mapping[str, Any], known: dict[str, Any], member: str) -> None:
    """Adds what a member contains. Raises ConfigError for a name that already means something else."""
    if taken := [name for name, settings in found.items() if known.get(name, settings) != settings]:
        raise ConfigError(f"task: {member}: contains {taken[0]}, which the group already has with other settings; "
                          "rename one of the two")  # fmt: skip
    known.update(found)
