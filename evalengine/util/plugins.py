"""Import by name what is needed only later: a command's work, an integration, an entry point of another package.

`evalengine.integrations` imports the core, so the core reaches it by `load` alone (docs/code.md).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def load(target: str) -> Any:
    """Import "module:attribute" and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def not_installed(extra: str, *libraries: str) -> str | None:
    """Return which libraries are not installed, and the command that installs them; None if all are there."""
    # A mere folder of its name, as W&B leaves in the working directory, is no library.
    missing = [name for name in libraries if (spec := find_spec(name)) is None or spec.origin is None]
    are = "are" if len(missing) > 1 else "is"
    return f"{', '.join(missing)} {are} not installed: pip install 'evalengine[{extra}]'" if missing else None


def added(group: str) -> dict[str, EntryPoint]:
    """Return the entry points that installed packages have in a group, by name."""
    from importlib.metadata import entry_points  # 10 ms, which most commands need not wait for

    return {entry.name: entry for entry in entry_points(group=group)}
