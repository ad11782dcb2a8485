"""Checks whether tasks may run programs that the model wrote, and whether this machine can isolate them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evalengine.config.schema import Config
from evalengine.programs.run import problem
from evalengine.tasks.base import Task


def isolated(config: Config) -> bool:
    """Whether programs are kept from network, files and other processes."""
    return config.allow_code_execution != "without_isolation"


def execution_problems(config: Config, tasks: Sequence[Task]) -> Iterator[str]:
    """Yields a sentence if tasks would run programs that may not be run, or cannot be run here."""
    names = [task.name for task in tasks if task.runs_programs]
    if not names:
        return
    programs = f"{', '.join(names)} {'run' if len(names) > 1 else 'runs'} programs that the model wrote"
    if not config.allow_code_execution:
        yield (
            f"allow_code_execution=false: {programs}; allow_code_execution=true runs them in processes of their own, "
            "within limits, without network, your files or your environment (tasks/README.md says what that does not "
            "protect against)"
        )
    elif why := problem(isolated(config)):
        yield f"allow_code_execution={str(config.allow_code_execution).lower()}: {programs}, and {why}"
