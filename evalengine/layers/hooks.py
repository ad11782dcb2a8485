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
    The tensor is the live one: a hook that keeps it must copy it.
    """

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                fn(name, output)
                return
            for index, part in enumerate(output):
                fn(f"{name}.{index}", part)

        return hook

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Layer)]
    handles = [module.register_forward_hook(hook_of(name)) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
