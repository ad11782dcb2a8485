"""What `tests.triton_interpreter` computes directly has the bytes and types that Triton's way gives."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from triton.language import core
from triton.runtime import interpreter

SHAPES = [((), ()), ((4, 8), (4, 8)), ((4, 1), (1, 8)), ((8,), (4, 8)), ((1,), ()), ((), (4, 8))]
TYPES = ["float16", "float32", "float64", "int32", "int64", "int1", "bfloat16", "uint8", "uint32"]
NUMBERS = [0, 3, -2, 2**33, 2.5, -0.0, 1e-40, float("inf"), True, core.constexpr(3), core.constexpr(1.5)]
OPERATORS = [
    *("add", "sub", "mul", "truediv", "radd", "rsub", "rmul", "rtruediv", "and", "or"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
]


def operand(scalar: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed).integers(-9, 9, shape or (1,))
    data = (drawn / 4 if scalar.is_floating() else drawn).astype(interpreter._get_np_dtype(scalar))
    handle = interpreter.TensorHandle(data, scalar)
    return core.tensor(handle, core.block_type(scalar, [*shape]) if shape else scalar)


def outcome(function: Any, left: Any, right: Any) -> Any:
    try:
        value = function(left, right)
    except Exception as error:
        return type(error)
    data = value.handle.data
    return str(value.type), str(value.dtype), str(value.handle.dtype), data.dtype, data.shape, data.tobytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is CUDA")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_what_tritons_way_gives(name: str) -> None:
    """Twice, as the first result of two types is Triton's."""
    attribute, patched, slow = f"__{name}__", {}, []
    member = getattr(core.tensor, attribute)

    def tritons(left: Any, right: Any, **_: Any) -> Any:
        slow.append(right)
        return member(left, right, _semantic=interpreter.interpreter_semantic)

    pointer, *scalars = [core.pointer_type(core.float16), *(getattr(core, scalar) for scalar in TYPES)]
    pairs = [
        (operand(a, one), operand(b, other, seed=1))
        for a, b, (one, other) in product([pointer, *scalars], scalars, SHAPES)
    ]
    pairs += [(operand(a, shape), b) for a, shape, b in product([pointer, *scalars], [(), (4, 8)], NUMBERS)]
    scope = SimpleNamespace(set_attr=lambda _, name, value: patched.update({name: value}))
    interpreter._patch_attr(core.tensor, attribute, tritons, None, scope)
    interpreter._patch_lang_core(core, language := interpreter._LangPatchScope())
    try:
        expected = [outcome(tritons, *pair) for pair in pairs]
        for _ in range(2):
            slow.clear()
            assert [outcome(patched[attribute], *pair) for pair in pairs] == expected
        assert len(slow) < len(pairs), "nothing is computed directly"
    finally:
        language.restore()
