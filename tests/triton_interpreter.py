"""Triton's interpreter with products whose rows do not depend on each other, in about a quarter of the time.

Its `tl.dot` is numpy's product, by the BLAS library, which on some processors gives a row other bits among other rows.
A GPU's product does not, and the tests of schedules compare bytes.

The other functions change no value. They save what the interpreter repeats in every launch, in every call of a device
function and for every value. Where Triton is missing or its interpreter is built differently, they do nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np


def list_builtins_once() -> None:
    """List the members of Triton's language that a launch replaces once, and replace none twice.

    The interpreter searches the language in every launch, and in every call of a device function within it.
    """
    try:
        from triton.language import core
        from triton.runtime import interpreter

        is_builtin, scope = core.is_builtin, interpreter._LangPatchScope
        patch_attribute, patch_language = interpreter._patch_attr, interpreter._patch_lang
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

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is interpreter.tl or value is core]

    def patch_lang(fn: Any) -> Any:
        return patch_language(fn) if any(is_builtin(module.load) for module in languages(fn)) else scope()

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang


def skip_overflow_checks() -> None:
    """Omit the checks of integer overflow, which compute in 64 bits for an assertion that only debug mode evaluates."""
    try:
        from triton.runtime.interpreter import interpreter_builder

        options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    except (ImportError, AttributeError, TypeError):
        return
    if not options.debug:
        interpreter_builder.options = options


def compute_types_once() -> None:
    """Compute what follows from a type once (a block's size and name, a tensor's shape), and compare types quickly."""
    try:
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter

        init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
        get_np_dtype, compare = interpreter._get_np_dtype, core.dtype.__eq__
        broadcast_values = TritonSemantic.broadcast_impl_value
        signatures = [[*inspect.signature(init).parameters] for init in (init_block, init_tensor)]
    except (ImportError, AttributeError):
        return
    if signatures != [["self", "element_ty", "shape"], ["self", "handle", "type"]]:
        return
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        # A pointer's name omits its address space, and a subclass may have further fields.
        if element_ty.__class__ is not core.dtype or self.__class__ is not core.block_type:
            init_block(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if (state := blocks.get(key)) is None:
            init_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(state)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.scalar.__class__ is not core.dtype or self.__class__ is not core.tensor:
            init_tensor(self, handle, type)
            return
        if (state := tensors.get(type.name)) is None:
            init_tensor(self, handle, type)
            tensors[type.name] = dict(self.__dict__)
        else:
            self.__dict__.update(state)
            self.handle, self.type = handle, type

    of_scalar = functools.cache(get_np_dtype)

    def np_dtype(tt_dtype: Any) -> Any:
        return (of_scalar if tt_dtype.__class__ is core.dtype else get_np_dtype)(tt_dtype)

    def equal(self: Any, other: Any) -> bool:
        return self is other or compare(self, other)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, two = lhs.type, rhs.type
        alike = one.__class__ is two.__class__ is core.block_type and one.shape.values == two.shape.values
        return (lhs, rhs) if alike else broadcast_values(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__ = block, tensor, equal
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = np_dtype


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
