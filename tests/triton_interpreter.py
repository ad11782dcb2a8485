"""Triton's interpreter with products whose rows do not depend on each other, and without half of its time.

Its `tl.dot` is numpy's product, by the BLAS library, which on some processors gives a row other bits among other rows.
A GPU's product does not, and the tests of schedules compare bytes.

In every launch, and in every call of a device function within it, the interpreter goes through all members of Triton's
language for those that it must replace. Which these are does not change, so they are listed once; and where the first
of a list is replaced already, all are.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np


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


def multiply_each_row_alike() -> None:
    """Has `tl.dot` sum every element's products in one order, whatever the tile's shape and the processor."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    by_blas = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return by_blas(self, a, b, d, *precision)
        left, right = np.ascontiguousarray(a.data), np.ascontiguousarray(b.data)  # its order of adding hangs on strides
        product = np.einsum("...mk,...kn->...mn", left, right, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
