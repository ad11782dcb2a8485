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


def compute_operators_directly() -> None:
    """Apply an operator to numpy's arrays where Triton's way, about thirty calls, would give the same array.

    It converts both operands to one type, fills a block with a scalar, and extends shapes that numpy extends alike.
    This covers operands of one plain type, 32-bit with 64-bit integers, numbers, and integers that are added to a
    pointer. The type of a result is the one that Triton's way gave for such operands before.
    """
    try:
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter

        handle_class, patch_attribute = interpreter.TensorHandle, interpreter._patch_attr
        unwrap, check_types = core._unwrap_if_constexpr, TritonSemantic.binary_op_type_checking_impl
        fields = [field.name for field in dataclasses.fields(handle_class)]
        made = [*vars(core.tensor(handle_class(np.zeros(1, np.int32), core.int32), core.int32))]
    except (ImportError, AttributeError, TypeError):
        return
    if fields != ["data", "dtype", "attr"] or made != ["handle", "shape", "numel", "type", "dtype"]:
        return
    if int(np.__version__.partition(".")[0]) < 2:  # whose Python numbers widen an array
        return
    floats = {
        core.float16: np.dtype(np.float16),
        core.float32: np.dtype(np.float32),
        core.float64: np.dtype(np.float64),
    }
    integers = {core.int32: np.dtype(np.int32), core.int64: np.dtype(np.int64)}
    functions: dict[str, Any] = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "lt": np.less,
        "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
        "and": np.bitwise_and, "or": np.bitwise_or, "radd": np.add, "rmul": np.multiply,
        "rsub": lambda x, y: np.subtract(y, x), "rtruediv": lambda x, y: np.divide(y, x),
    }  # fmt: skip

    def array_types(name: str, one: Any, other: Any) -> tuple[Any, Any, Any] | None:
        """The operands' types as numpy's, and the one that Triton computes in; None where it must take its own way."""
        types = {**floats, **integers}
        if name in ("and", "or"):
            types = {core.int1: np.dtype(bool), **integers}
        elif "truediv" in name:  # a float16 is widened
            types = {scalar: floats[scalar] for scalar in (core.float32, core.float64)}
        if one not in types or other not in types or (one is not other and not {one, other} <= {*integers}):
            return None
        return types[one], types[other], one if one is other else core.int64

    def of_number(name: str, scalar: Any, kind: type) -> Any:
        """The type that a number gets next to a tensor of this type; None where that hangs on the number."""
        if scalar not in (floats if kind is float else {**floats, **integers}):
            return None
        if name in ("lt", "le", "gt", "ge", "eq", "ne"):  # as a tensor of its smallest type, which may widen the other
            return scalar if kind is int and scalar in integers else None
        return scalar

    def operator(name: str, slow: Any) -> Any:
        function = functions[name]
        known: dict[
            Any, Any
        ] = {}  # the operands' types -> numpy's, the type or the element's bytes, an example of a result

        def learn(key: Any, left: Any, right: Any) -> Any:
            value, one = slow(left, right), left.dtype
            known[key] = None
            if key[1] not in (int, float):
                other = right.dtype
            else:
                other = None if one.__class__ is core.pointer_type else of_number(name, one, key[1])
            if one.__class__ is other.__class__ is core.dtype:
                if (types := array_types(name, one, other)) is not None:
                    known[key] = *types, 0, dict(vars(value))
            elif name == "add" and one.__class__ is core.pointer_type and other in (core.int32, core.int64):
                width = max(1, left.handle.get_element_ty().primitive_bitwidth // 8)
                known[key] = None, integers[other], None, width, dict(vars(value))
            return value

        def apply(left: Any, right: Any) -> Any:
            kind = right.__class__
            if kind is core.constexpr:
                right, kind = right.value, right.value.__class__
            if kind is core.tensor:
                key, array = (left.type.name, right.type.name), right.handle.data
            elif kind is float or (kind is int and -(2**31) <= right < 2**31):
                key, array = (left.type.name, kind), right + 0  # Triton has no constant -0.0
            else:
                return slow(left, right)
            if (way := known.get(key, key)) is key:
                return learn(key, left, right)
            if way is None:
                return slow(left, right)
            one_type, other_type, dtype, width, example = way
            handle = left.handle
            if kind is core.tensor and array.dtype is not other_type:
                return slow(left, right)
            if width:
                data, dtype = handle.data + width * array.astype(np.uint64), handle.dtype
            elif handle.data.dtype is one_type:
                data = function(handle.data, array)
            else:
                return slow(left, right)
            result, value = object.__new__(handle_class), object.__new__(core.tensor)
            result.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
            value.__dict__ = {**example, "handle": result}
            return value

        return apply

    @functools.cache
    def quick(name: str, member: Any) -> Any:
        return operator(name, lambda left, right: member(left, right, _semantic=interpreter.interpreter_semantic))

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if obj is core.tensor and name.startswith("__") and name.strip("_") in functions:
            scope.set_attr(obj, name, quick(name.strip("_"), member))
        else:
            patch_attribute(obj, name, member, builder, scope)

    def checked(self: Any, lhs: Any, rhs: Any, *how: Any, **more: Any) -> Any:
        if lhs.__class__ is rhs.__class__ is core.tensor and not how and not more and lhs.type.name == rhs.type.name:
            scalar = lhs.type.scalar
            if scalar.__class__ is core.dtype and (scalar in floats or scalar in integers):
                return lhs, rhs
        return check_types(self, lhs, rhs, *how, **more)

    def unwrap_if_constexpr(o: Any) -> Any:
        return o if o.__class__ is core.tensor else unwrap(o)

    interpreter._patch_attr, core._unwrap_if_constexpr = patch_attr, unwrap_if_constexpr
    TritonSemantic.binary_op_type_checking_impl = checked


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
