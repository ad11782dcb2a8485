"""From a task's name and configuration to its class: conf/task/<name>.yaml says which one."""

from __future__ import annotations

from importlib import import_module, resources
from typing import Any

from evalengine.config import TaskConfig
from evalengine.errors import ConfigError
from evalengine.tasks.base import Task


def available_tasks() -> list[str]:
    """The names of the tasks that conf/task/ describes, sorted."""
    folder = resources.files("evalengine") / "conf" / "task"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_task(name: str, config: TaskConfig, **arguments: Any) -> Task:
    """The task `name`, constructed with `arguments` (see `Task`) and not loaded yet.

    Raises ConfigError for a name that no configuration describes, a `cls` that does not exist, or settings that the
    task cannot honour.
    """
    if not config.cls:
        raise ConfigError(f"task={name}: there is no such task; available are {', '.join(available_tasks())}")
    module, _, attribute = config.cls.partition(":")
    try:
        cls = getattr(import_module(f"evalengine.tasks.{module}"), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"tasks.{name}.cls={config.cls} is not a module:Class of evalengine.tasks: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(f"tasks.{name}.cls={config.cls} is not a Task")
    return cls(name, config, **arguments)
