"""Launching a kernel from Python at little cost: at decode the host must issue about ten kernels a layer.

Triton's own `kernel[grid](...)` works out, on every call, which compiled variant the arguments ask for; with some 25
parameters that took tens of microseconds (one sequence of 1,024 tokens: 36 us a call, of which the GPU worked 8).
Here the variant is looked up by what can tell variants apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evalengine.kernels.device_math import INTERPRETED

_compiled: dict[tuple, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple,
    constants: tuple,
    num_warps: int,
    num_stages: int,
    **options: Any,
) -> Any:
    """Runs `kernel`, whose parameters are `args` and then its constexprs, `constants`, on the current stream of the
    device that the tensors lie on.

    Triton's specialisation is kept: an integer that is 1 or a multiple of 16, a pointer aligned to 16 bytes. Always
    without FMA contraction, as the contract has it.

    Returns the compiled variant, which `compiled[grid](*args, *constants)` runs again for arguments of the same kinds;
    None if nothing was compiled (the interpreter, an empty grid).
    """
    if INTERPRETED or 0 in grid:
        if 0 not in grid:
            kernel[grid](*args, *constants)
        return None
    device = next(index for arg in args if (index := _device(arg)) is not None)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, num_warps, num_stages, **options)
    key = (kernel, constants, num_warps, num_stages, device, *map(_kind, args), *options.values())
    compiled = _compiled.get(key)
    if compiled is None:
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False, **options}
        compiled = _compiled[key] = kernel[grid](*args, *constants, **options)
    else:
        compiled[grid](*args, *constants)
    return compiled


def _device(arg: Any) -> int | None:
    """Where an argument lies, if it lies anywhere."""
    if isinstance(arg, Tensor):
        return arg.get_device()
    return arg.base.get_device() if hasattr(arg, "base") else None


def _kind(arg: Any) -> object:
    """What Triton specialises this argument on."""
    if isinstance(arg, int):
        return arg == 1, arg & 15 == 0, -(1 << 31) <= arg < 1 << 31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15 == 0
    if arg is None or isinstance(arg, float):
        return type(arg)
    return arg.base.dtype, tuple(arg.block_shape)  # a TensorDescriptor
