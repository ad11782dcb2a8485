"""Finds the class that runs a task: `conf/task/<name>.yaml`, or a file of the user's, names it as "module:Class"."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from evalengine.config.schema import TaskConfig
from evalengine.config.shipped import available
from evalengine.errors import ConfigError
from evalengine.tasks.base import Task
from evalengine.tasks.templated import class_of_file

# A class that is no longer in this folder, under the name that configurations of runs have for it.
ELSEWHERE = {"lm_eval_task:LmEvalTask": "evalengine.integrations.lm_eval_tasks.task:LmEvalTask"}


def load_task(name: str, config: TaskConfig, **arguments: Any) -> Task:
    """The task `name`, not yet loaded; `arguments` are Task's.

    Raises ConfigError: a name without configuration, a class that does not exist, is no Task or leaves something out,
    or settings that the task cannot honour.
    """
    if not config.cls:
        raise ConfigError(f"task={name}: there is no such task; available are {', '.join(available('task'))}")
    cls = task_class(config.cls, f"tasks.{name}.cls")
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"tasks.{name}.cls={config.cls}: the class does not write {', '.join(missing)}")
    return cls(name, config, **arguments)


def task_class(named: str, setting: str) -> type[Task]:
    """The class that "module:Class" names: of a YAML file or module of evalengine.tasks, or any that can be imported.

    setting: the setting that named it, for the ConfigError if there is no such class.
    """
    module, _, attribute = ELSEWHERE.get(named, named).partition(":")
    if module.isidentifier() and (described := class_of_file(module, attribute)) is not None:
        return described
    try:
        own = module.isidentifier() and find_spec(f"evalengine.tasks.{module}") is not None
        cls = getattr(import_module(f"evalengine.tasks.{module}" if own else module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{setting}={named} is not a module:Class, neither of evalengine.tasks nor of a package that can be "
            f"imported: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(f"{setting}={named} is not a Task")
    return cls


def class_defaults(named: str, setting: str) -> TaskConfig:
    """The settings that a class brings along, as `defaults`. Raises ConfigError for a class without them."""
    defaults = getattr(task_class(named, setting), "defaults", None)
    if not isinstance(defaults, TaskConfig):
        raise ConfigError(f"{setting}={named} has no `defaults`, a TaskConfig; or name the class in a YAML file")
    return defaults
