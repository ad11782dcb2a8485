"""Triton's interpreter without its search for what to replace, which takes half the time of the kernels' tests.

In every launch, and in every call of a device function within it, the interpreter goes through all members of Triton's
language for those that it must replace. Which these are does not change, so they are listed once; and where the first
of a list is replaced already, all are.
"""

from __future__ import annotations

import inspect
from typing import Any


def list_builtins_once() -> None:
    """Replaces the interpreter's search; does nothing where Triton is missing or its interpreter is another one."""
    try:
        from triton.language.core import is_builtin
        from triton.runtime import interpreter

        patch_attribute = interpreter._patch_attr
        parameters = [*inspect.signature(interpreter._patch_builtin).parameters]
    except (ImportError, AttributeError):
        return
    if parameters != ["pkg", "builder", "scope"]:
        return
    names: dict[Any, list[str]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            names[pkg] = [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]
        if names[pkg] and not is_builtin(getattr(pkg, names[pkg][0])):
            return
        for name in names[pkg]:
            patch_attribute(pkg, name, getattr(pkg, name), builder, scope)

    interpreter._patch_builtin = patch_builtin
