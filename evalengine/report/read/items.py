"""An item of a run by the name that a command's `--item` gives it."""

from __future__ import annotations

from evalengine.errors import ConfigError
from evalengine.report.read.run import Key, Run


def named_item(run: Run, text: str, command: str) -> Key:
    """The key of the item named `3`, `gsm8k/3`, `gsm8k/3/1` or `gsm8k/3/1/0`. Raises `ConfigError` if there is none."""
    parts = text.split("/")
    tasks = sorted({key[0] for key in run.items})
    if len(parts) == 1 and len(tasks) == 1:
        parts = [tasks[0], *parts]
    if len(parts) < 2 or len(parts) > 4 or not all(part.isdecimal() for part in parts[1:]):
        names = ", ".join(f"{task}/0" for task in tasks)
        raise ConfigError(f"{command}: --item {text}: name a task and a document, such as {names}")
    first, second, third = [*map(int, parts[1:]), 0, 0][:3]
    key = (parts[0], first, second, third)
    if key not in run.items:
        raise ConfigError(f"{command}: --item {text}: {run.name} has no such request; its tasks are {', '.join(tasks)}")
    return key


def item_name(key: Key) -> str:
    """An item's name for people: `gsm8k doc 3`, with request and repeat where they are not the first."""
    return f"{key[0]} doc {document_name(key)}"


def document_name(key: Key) -> str:
    """An item's name beside its task's: `3`, or `3 request 1`."""
    _, doc, request, repeat = key
    return str(doc) + (f" request {request}" if request else "") + (f" repeat {repeat}" if repeat else "")
