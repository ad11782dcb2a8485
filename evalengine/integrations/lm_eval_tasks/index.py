"""The tasks, groups and tags that the installed lm-evaluation-harness knows, by name, without any of their rows.

`task=lm_eval/mmlu` names a group of it: `chosen("mmlu")` is its 57 tasks with the settings that each has there (a group
may change its members' settings), and its groups. lm-eval's own factory walks the groups; no task is loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from yaml import YAMLError

from evalengine.config.schema import LM_EVAL_OWN, Aggregate, GroupConfig
from evalengine.errors import ConfigError, one_line
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.util.hub import said_if_long
from evalengine.util.plain_files import YAML_SUFFIXES

PREFIX = "lm_eval/"
CLS = "lm_eval_task:LmEvalTask"
NEEDED = "0.4.13"
_APART = r"\s'\"\[\],"  # characters between the words of a YAML file
_NAMES = re.compile(r"^[\s-]*[\"']?(?:task|group|tag)[\"']?:[ \t]*[\"']?([^\s\"'#\[]+)", re.MULTILINE)


@dataclass(frozen=True)
class Leaf:
    """One task of lm-eval. `outline`: its YAML file, functions as texts; `settings`: imports the functions as well."""

    name: str
    outline: dict[str, Any]
    settings: Callable[[], dict[str, Any]]

    @property
    def task_name(self) -> str:  # lm-eval's groups ask their members for this attribute
        return self.name


@dataclass(frozen=True)
class Chosen:
    """The tasks and groups that one name of lm-eval stands for, under names that files can have."""

    tasks: dict[str, Leaf]
    groups: dict[str, GroupConfig]


def lm_eval_version() -> str:
    """The version of the installed lm-eval. Raises ConfigError with the fix if none is installed."""
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        raise ConfigError(
            f"needs lm-evaluation-harness, which is not installed: pip install 'evalengine[lm-eval]' (lm-eval {NEEDED} "
            "or newer)"
        ) from None


@lru_cache(None)
def chosen(name: str) -> Chosen:
    """The task, group or tag of that name. Raises ConfigError for one that the installed lm-eval does not have."""
    lm_eval_version()
    if not _is_mentioned(name):
        raise _unknown(name, {*_NAMES.findall(_texts())})
    manager, factory = lm_eval_tasks()
    entry = manager.task_index.get(name)
    if entry is None:
        raise _unknown(name, manager.task_index)
    try:
        with quiet():
            built = factory.build(entry, overrides=None, registry=dict(manager.task_index))
    except Exception as error:  # a group's YAML file and its functions may raise anything
        raise ConfigError(f"lm-eval cannot read it: {type(error).__name__}: {error}") from error
    tasks: dict[str, Leaf] = {}
    groups: dict[str, GroupConfig] = {}
    for item in built if isinstance(built, list) else [built]:
        _collect(item, tasks, groups)
    if not tasks:
        raise ConfigError(f"lm-eval {lm_eval_version()} has no task in it")
    return Chosen(tasks, groups)


def _unknown(name: str, names: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(name, names, 3, 0.7)
    hint = f"did you mean {' or '.join(PREFIX + other for other in near)}?" if near else "lm_eval ls tasks has them"
    own = "a YAML file of your own is task=./FILE.yaml"
    return ConfigError(f"lm-eval {lm_eval_version()} has no task, group or tag of that name; {hint}; {own}")


@lru_cache(None)
def _texts() -> str:
    """The texts of all of lm-eval's YAML files; "" if it is in no folder. Read in half a second, where lm-eval takes
    ten to a hundred to build its index of them: a name that stands nowhere in them needs no index."""
    package = find_spec("lm_eval")
    folders = (package.submodule_search_locations if package else None) or []
    files = (file for folder in folders for file in sorted((Path(folder) / "tasks").rglob("*")))
    yaml = [file for file in files if file.name.endswith("yaml") or not file.suffix]  # some that others include
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in yaml if file.is_file())


def _is_mentioned(name: str) -> bool:
    """Whether the name is a word of some file; True where there are no files to look in."""
    return not _texts() or bool(re.search(rf"(?<![^{_APART}]){re.escape(name)}(?![^{_APART}])", _texts()))


def composed(name: str) -> dict[str, Any]:
    """The `tasks` and `groups` that choosing the name adds to a configuration. Raises ConfigError as `chosen` does."""
    choice = chosen(name)
    return {
        "tasks": {task: _composed(f"{name}/{task}", leaf.outline) for task, leaf in choice.tasks.items()},
        "groups": {group: asdict(settings) for group, settings in choice.groups.items()},
    }


def leaf_of(path: str) -> Leaf:
    """The task of a run's configuration: "CHOSEN NAME/TASK", as `composed` wrote it, or a YAML file's path. Raises
    ConfigError."""
    if path.endswith(YAML_SUFFIXES):
        return _of_file(Path(path))
    name, _, task = path.rpartition("/")
    tasks = chosen(name).tasks
    if task not in tasks:
        raise ConfigError(f"lm-eval {lm_eval_version()} has no task {task} in {name}; choose it as task={PREFIX}NAME")
    return tasks[task]


@contextmanager
def _of_lm_eval() -> Iterator[None]:
    """Imports of what an lm-eval new enough has, quietly. Raises ConfigError for an older one."""
    installed = lm_eval_version()
    try:
        with quiet():
            yield
    except ImportError as error:
        raise ConfigError(f"needs lm-eval {NEEDED} or newer; installed is {installed} ({error})") from error


def _of_file(file: Path) -> Leaf:
    """The task of a user's YAML file, which `lm_eval_yaml` has checked."""
    with _of_lm_eval():
        from lm_eval.tasks._yaml_loader import load_yaml

    def read(*, functions: bool) -> dict[str, Any]:
        content = load_yaml(file, resolve_func=functions)
        theirs = {key: value for key, value in content.items() if key not in LM_EVAL_OWN}
        return {"task": file.stem, **theirs, "metadata": dict(content.get("metadata") or {})}

    try:
        outline = read(functions=False)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{file}: {one_line(error)}") from error
    sandbox_templates()
    return Leaf(outline["task"], outline, lambda: read(functions=True))


def sandbox_templates() -> None:
    """Lets lm-eval render templates in Jinja2's sandbox, where they cannot reach Python. Those of a user's file may be
    a stranger's, and the file need not name any Python code."""
    from lm_eval import utils

    env = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    env.filters.update(utils.env.filters)
    utils.env = env


def metric_names(outline: dict[str, Any]) -> list[str]:
    """The metrics that a task's file names; "?" where it leaves them to lm-eval."""
    entries = outline.get("metric_list")
    names = [entry.get("metric") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [re.split(r"[./]", str(metric))[-1] for metric in names] or ["?"]


def _composed(path: str, outline: Mapping[str, Any]) -> dict[str, Any]:
    dataset = {key: outline.get(f"dataset_{key}") for key in ("path", "name")}
    return leaf_settings(outline, {key: None if v is None else str(v) for key, v in dataset.items()}, path)


def leaf_settings(outline: Mapping[str, Any], dataset: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The configuration of a task that lm-eval runs. path: as for `leaf_of`."""
    metadata = outline.get("metadata")
    return {
        "cls": CLS,
        "alias": outline.get("task_alias"),
        "version": _number(metadata.get("version")) if isinstance(metadata, dict) else None,
        "num_fewshot": outline.get("num_fewshot"),
        "dataset": dataset,
        "lm_eval": {"name": path},
    }


def file_settings(content: dict[str, Any], dataset: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """`leaf_settings` of a user's YAML file. Raises ConfigError for metrics and filters that lm-eval does not know."""
    if unknown := sorted(_unregistered(content)):
        raise ConfigError(f"{file}: lm-eval {lm_eval_version()} has no {', '.join(unknown)}")
    return leaf_settings(content, dataset, str(file.resolve()))


def _unregistered(content: dict[str, Any]) -> set[str]:
    """The metrics, aggregations and filters that lm-eval does not know. It would look for such a metric on the Hub and
    run what it finds there, which a file can ask for by `hf_evaluate`."""
    with quiet():
        import lm_eval.filters
        from lm_eval.api import metrics, registry
    assert lm_eval.filters and metrics, "they fill the registries"
    metric_list = [] if content.get("process_results") else content.get("metric_list") or []
    named = [("metric", e["metric"], registry.metric_registry) for e in metric_list if not e.get("hf_evaluate")]
    named += [("aggregation", e.get("aggregation"), registry.aggregation_registry) for e in metric_list]
    for entry in content.get("filter_list") or []:
        named += [("filter", step["function"], registry.filter_registry) for step in entry["filter"]]
    return {f"{kind} {name}" for kind, name, known in named if isinstance(name, str) and name not in known}


def _collect(item: Any, tasks: dict[str, Leaf], groups: dict[str, GroupConfig]) -> str:
    """Adds a task to `tasks`, or a group with all its members to both, and returns its name."""
    if isinstance(item, Leaf):
        tasks[plain_name(item.name)] = item
        return plain_name(item.name)
    name = plain_name(item.name)
    groups[name] = GroupConfig()  # reserves the group's place before the groups within it
    children = [_collect(child, tasks, groups) for child in item]
    metadata = item.metadata if isinstance(item.metadata, dict) else {}
    entries = item.aggregate_metric_list
    groups[name] = GroupConfig(
        tasks=children,
        alias=item.alias,
        version=metadata.get("version"),
        aggregate_metric_list=None if entries is None else [_aggregate(entry, name) for entry in entries],
    )
    return name


def _aggregate(entry: Any, group: str) -> Aggregate:
    if entry.aggregation != "mean":
        raise ConfigError(f"the group {group} adds up {entry.metric} by its own function; choose its tasks")
    return {"metric": entry.metric, "weight_by_size": entry.weight_by_size, "filter_list": entry.filter_list}


def plain_name(name: str) -> str:
    """The name with _ in place of characters that no file's name should hold, at most 100 characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:100]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@lru_cache(None)
def lm_eval_tasks() -> tuple[Any, Any]:
    """(lm-eval's index of all tasks, built in ten seconds; the factory that walks it). Raises ConfigError."""
    with said_if_long("lm-eval reads the files of all its tasks, which takes 10 s, and minutes on a busy machine"):
        return _lm_eval_tasks()


def _lm_eval_tasks() -> tuple[Any, Any]:
    with _of_lm_eval():
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._factory import TaskFactory

    class Outline(TaskFactory):
        """lm-eval's own walk over groups, tags and overrides, which gives leaves instead of loaded tasks."""

        def _build_task(self, entry: Any, overrides: dict[str, Any] | None) -> Leaf:
            raw = {**(entry.cfg or {}), **(overrides or {})}
            name = str((overrides or {}).get("task") or entry.name)
            return Leaf(name, raw, lambda: self._load_full_config(entry, overrides))

        def _build_group_members(self, member_list: Any, group_name: str, overrides: Any, registry: Any) -> list[Any]:
            return [child for item in member_list for child in self._members(item, group_name, overrides, registry)]

        def _members(self, item: Any, group: str, overrides: Any, registry: Any) -> Iterator[Any]:
            inline = isinstance(item, dict) and "group" not in item and item.get("task") not in registry
            if inline:  # the task is written out within the group
                own = {**(overrides or {}), **item, "task": f"{group}::{item.get('task')}"}
                yield Leaf(own["task"], own, lambda: {**own, "metadata": own.get("metadata") or {}})
            else:
                yield from super()._build_group_members([item], group, overrides, registry)

    with quiet():
        return TaskManager(), Outline()
