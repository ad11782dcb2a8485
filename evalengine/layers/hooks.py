"""Shows every op's output to a function, e.g. to digest it and find the first op where two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from evalengine.layers.base import Layer


@contextmanager
def op_hook(model: nn.Module, fn: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `fn(name, output)` after every op of `model`, in execution order, while the context is open.

    `name` is the layer's path (`model.layers.0.mlp.down_proj`); an op with two outputs reports `<path>.0` and `.1`.
    The tensor is the live one: a hook that keeps it must copy it. A model that is not made of layers names its ops
    itself (`named_ops`); of these the outputs that have a row for each token of a batch of one, [1, T, ...], are shown,
    as [T, ...].
    """
    own = getattr(model, "named_ops", None)

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if own is not None:
                output = _rows(output)
            if isinstance(output, Tensor):
                fn(name, output)
                return
            for index, part in enumerate(output):
                fn(f"{name}.{index}", part)

        return hook

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, Layer)] if own is None else list(own())
    handles = [module.register_forward_hook(hook_of(name)) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(output: Any) -> Any:
    parts = [output] if isinstance(output, Tensor) else output if isinstance(output, tuple | list) else []
    rows = [x[0] for x in parts if isinstance(x, Tensor) and x.ndim > 2 and len(x) == 1 and x.is_floating_point()]
    return rows[0] if isinstance(output, Tensor) and rows else rows
