"""`python -m evalengine tasks`: lists the tasks, and shows a task's prompts, before any model is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evalengine.config.shipped import available, outline
from evalengine.errors import ConfigError, listed
from evalengine.plain_text import say, warn
from evalengine.util.command import Namespace

if TYPE_CHECKING:
    from evalengine.config.schema import Config, TaskConfig
    from evalengine.tasks.base import Task
    from evalengine.tasks.instance import Instance
    from evalengine.util.sheet import Sheet

LISTED_METRICS = 1  # of a task among others; `tasks NAME` names all of them
SHORT = 8  # hex digits of a commit that are shown


def main(arguments: Namespace) -> int:
    """Runs `tasks` with its words; returns the exit code. Raises ConfigError for bad usage."""
    from rich.console import Console

    from evalengine.util.tables import print_sheet

    names = [word for word in arguments.words if "=" not in word]
    settings = [word for word in arguments.words if "=" in word]
    if len(names) > 1:
        raise ConfigError(f"tasks: {' '.join(names)}: name one task, or none to list them all")
    if named := [word for word in settings if word.startswith("task=")]:
        raise ConfigError(f"tasks: {named[0]}: name the task as it is, python -m evalengine tasks NAME")
    if arguments.show is not None and not names:
        raise ConfigError("tasks: --show needs a task: python -m evalengine tasks NAME --show 3")
    configs = list(_configs(names, settings))
    if arguments.show is None:
        print_sheet(task_table(configs, folded=not names), Console(file=sys.stdout, soft_wrap=True))
    for line in () if arguments.show is None else shown_documents(configs[0], arguments.show):
        say(line)
    return 0


def _configs(names: Sequence[str], settings: Sequence[str]) -> Iterator[Config]:
    """The configuration of the named task, or of every task. Each is composed separately, since a group may change the
    settings of its tasks."""
    from evalengine.config.compose import TASKS, compose_jobs
    from evalengine.util.plugins import added

    shipped = [] if names or settings else available("task")
    for name in names or sorted({*available("task"), *added(TASKS)}):
        if name in shipped:
            yield outline(name)
        else:
            yield from (job.config for job in compose_jobs([f"task={name}", *settings]))


def task_table(configs: Sequence[Config], folded: bool = False) -> Sheet:
    """A row for each task: name, source, documents, few-shots, metrics, needs. folded: groups without their members,
    and short cells."""
    from evalengine.util.sheet import Sheet

    rows = [
        _cells(config, depth, name, members, folded)
        for config in configs
        for depth, name, members in _in_order(config)
        if depth == 0 or not folded
    ]
    return Sheet("Tasks", ("Task", "Rows", "Documents", "n-shot", "Metrics", "Needs"), rows, (0, 1, 4, 5))


def _cells(config: Config, depth: int, name: str, members: Sequence[str], short: bool) -> list[str]:
    """The row of a task, or of a group: what its tasks have in common, and their documents together."""
    from evalengine.tasks.registry import task_class

    group, tasks = config.groups.get(name), [config.tasks[member] for member in members]
    sizes = [task.dataset.rows for task in tasks if task.dataset.rows is not None]
    if group is None:
        metrics = [*task_class(tasks[0].cls or "", f"tasks.{name}.cls").metrics_of(tasks[0])]
    else:
        metrics = [str(entry["metric"]) for entry in group.aggregate_metric_list or []]
    return [
        "  " * depth + name + ("" if group is None else f" ({len(members)} tasks)"),
        _common(source(task, group is None and not short) for task in tasks),
        f"{sum(sizes):,}" if len(sizes) == len(tasks) else "",
        _common(str(task.num_fewshot or 0) for task in tasks),
        listed(metrics, LISTED_METRICS if short else len(metrics)),
        "; ".join(dict.fromkeys(need for task in tasks for need in needs(task))),
    ]


def _common(values: Iterable[str]) -> str:
    first, *others = {*values}
    return "various" if others else first


def _in_order(config: Config) -> Iterator[tuple[int, str, list[str]]]:
    """(depth, name, its tasks) of every group, its members following it, and of every task outside all groups."""
    from evalengine.config.schema import leaves

    grouped = {child for group in config.groups.values() for child in group.tasks}
    waiting = [(0, name) for name in reversed([*config.groups, *config.tasks]) if name not in grouped]
    while waiting:
        depth, name = waiting.pop()
        group = config.groups.get(name)
        yield depth, name, [name] if group is None else leaves(name, config.groups)
        if group is not None:
            waiting.extend((depth + 1, child) for child in reversed(group.tasks))


def source(task: TaskConfig, named: bool = True) -> str:
    """The source of the rows, in words. named: with the Hub's configuration."""
    path = task.dataset.path or "?"
    if path.startswith("asset:"):
        return "bundled"
    if task.dataset.files and path in ("json", "csv", "parquet", "arrow", "text"):
        return f"local {path}"
    name = f" {task.dataset.name}" if task.dataset.name and named else ""
    revision = task.dataset.revision
    return f"{path}{name} @ {revision[:SHORT] if revision else 'newest'}"


def needs(task: TaskConfig) -> Iterator[str]:
    """Yields what a run of the task needs in addition to the rows."""
    from evalengine.tasks.registry import task_class

    exemplars = task.fewshot_split or task.fewshot_file or task.template.fewshot_config.samples
    if task.dataset.gated:
        yield "access to the rows on the Hub"
    cls = task_class(task.cls or "", "cls")
    if cls.runs_programs:
        yield "allow_code_execution=true"
    extra = cls.extra or ("lm-eval" if task.template.lm_eval_file is not None else None)
    if extra is not None:
        yield f"evalengine[{extra}]"
    elif task.num_fewshot and not exemplars:
        yield "task.fewshot_file=FILE"


def shown_documents(config: Config, count: int) -> Iterator[str]:
    """The first documents of each of the tasks, as lines. Raises ConfigError as a run with this limit."""
    from evalengine.harness.plan import load_tasks

    for task in load_tasks(replace(config, limit=count)):
        documents = task.instances(count)
        for line in task.warnings(len(documents)):
            warn(line)
        for doc_id, instances in enumerate(documents):
            yield f"{task.name}, document {doc_id} of {len(task.docs)}"
            for name, content in _parts(task, doc_id, instances):
                text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
                yield f"  {name}"
                yield from (f"  | {line}" for line in text.split("\n"))  # white space shows behind the bar
            yield ""


def _parts(task: Task, doc_id: int, instances: list[Instance]) -> Iterator[tuple[str, object]]:
    """The name and the content of each part of a document."""
    yield "row", task.docs[doc_id]
    shown: str | None = None
    for instance in instances:
        if instance.context != shown:
            yield "text" if instance.kind == "loglikelihood_rolling" else "prompt", instance.context
            shown = instance.context
        if instance.kind == "loglikelihood":
            yield f"continuation {instance.index}", instance.continuation
    yield "target", task.target(task.docs[doc_id])
