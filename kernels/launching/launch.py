"""Launching a kernel from Python at little cost: at decode the host must issue about ten kernels a layer.

Triton's own `kernel[grid](...)` works out, on every call, which compiled variant the arguments ask for; with some 25
parameters that took tens of microseconds (one sequence of 1,024 tokens: 36 us a call, of which the GPU worked 8).
Here the variant is looked up by the properties on which Triton specialises; and a wrapper that has seen operands of the
same kinds before (`operand_key`) repeats its whole launch (`Launch.replayer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from evalengine.kernels.launching.driver import DriverKernel, Repeat, Unsupported

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on the CPU, in tests
# Launches that one wrapper remembers: one for each operand shape and number of rows, 30 kB each with its tensor maps.
MAX_CACHED_LAUNCHES = 1 << 12
Replay = Callable[..., None]
Repeated = TypeVar("Repeated")
Observer = Callable[[Any, tuple[int, int, int], tuple, tuple, dict[str, Any]], None]
_variants: dict[tuple, _Variant] = {}
_observer: Observer | None = None


class _Variant:
    """A compiled kernel, with its constexprs, on one device; or one that the interpreter runs, without a device."""

    def __init__(self, compiled: Any, constants: tuple, device: int | None) -> None:
        self.compiled, self.constants, self.device = compiled, constants, device
        self.direct: DriverKernel | None = None
        if device is not None:
            with suppress(Unsupported):
                self.direct = DriverKernel(compiled, device)
                # A kernel that waits for the one before it may be started early, as `Repeat` does.
                compiled.run.launch_pdl = self.direct.waits

    def replayer(self, grid: tuple[int, int, int], args: tuple, varying: Sequence[int]) -> Replay:
        if self.direct is not None:
            try:
                return Repeat(self.direct, grid, args, varying)
            except Unsupported:
                self.direct = None
        run, places = self.compiled[grid], [_emptied(arg) if i in varying else arg for i, arg in enumerate(args)]

        def by_triton(*tensors: Tensor) -> None:
            filled = list(places)
            for position, tensor in zip(varying, tensors, strict=True):
                filled[position] = tensor if places[position] is None else _filled(places[position], tensor)
            # Triton launches on the current device's stream.
            with nullcontext() if self.device is None else torch.cuda.device(self.device):
                run(*filled, *self.constants)

        return by_triton


class Launch:
    """A launch that has been made and can be repeated."""

    def __init__(self, variant: _Variant, grid: tuple[int, int, int], args: tuple) -> None:
        self.args = args
        self._variant, self._grid = variant, grid

    def replayer(self, *varying: int) -> Replay:
        """Returns the same launch for other tensors of the same kinds in these places of `args` (in a descriptor's
        place: its base)."""
        return self._variant.replayer(self._grid, self.args, varying)


@contextmanager
def observed_launches(observer: Observer) -> Iterator[None]:
    """Within, `launch` runs nothing: it tells kernel, grid, arguments, constexprs and options. Results are not written,
    so nothing may depend on them."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple,
    constants: tuple,
    num_warps: int,
    num_stages: int,
    **options: Any,
) -> Launch | None:
    """Runs `kernel`, whose parameters are `args` and then its constexprs, `constants`, on the current stream of the
    device that the tensors lie on.

    Arguments are specialised as Triton does: an integer that is 1 or a multiple of 16, a pointer aligned to 16 bytes.
    Kernels are compiled without FMA contraction, as the contract demands. Returns None if the launch cannot be
    repeated (an observed one, an empty grid). The interpreter's launches are repeated, too: a wrapper that finds a
    launch under a key which does not determine it then fails tests on a CPU, not only on a GPU.
    """
    if 0 in grid:
        return None
    if _observer is not None:
        _observer(kernel, grid, args, constants, _options(num_warps, num_stages, options))
        return None
    if INTERPRETED:
        kernel[grid](*args, *constants)
        return Launch(_Variant(kernel, constants, None), grid, args)
    device = next(index for arg in args if (index := _device(arg)) is not None)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, num_warps, num_stages, **options)
    key = (kernel, constants, num_warps, num_stages, device, *map(_specialization, args), *options.values())
    variant = _variants.get(key)
    if variant is None:
        compiled = kernel[grid](*args, *constants, **_options(num_warps, num_stages, options))
        variant = _variants[key] = _Variant(compiled, constants, device)
    else:
        variant.compiled[grid](*args, *constants)
    return Launch(variant, grid, args)


def _options(num_warps: int, num_stages: int, others: dict[str, Any]) -> dict[str, Any]:
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False, **others}


def operand_key(x: Tensor | None) -> tuple | None:
    """The properties of an operand on which a launch depends: equal kinds have equal grids, variants and scalars."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.get_device())


def cache_launch(memory: dict[tuple, Repeated], key: tuple, replayer: Repeated) -> None:
    """Puts a launch into a wrapper's memory, which is emptied when it is full."""
    if len(memory) >= MAX_CACHED_LAUNCHES:
        memory.clear()
    memory[key] = replayer


def _device(arg: Any) -> int | None:
    """The device index of a tensor or a descriptor; None for other arguments."""
    if isinstance(arg, Tensor):
        return arg.get_device()
    return arg.base.get_device() if hasattr(arg, "base") else None


def _specialization(arg: Any) -> object:
    """The properties of an argument on which Triton specialises a kernel."""
    if isinstance(arg, int):
        return arg == 1, arg & 15 == 0, -(1 << 31) <= arg < 1 << 31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15 == 0
    if arg is None or isinstance(arg, float):
        return type(arg)
    return arg.base.dtype, tuple(arg.block_shape)  # `arg` is a tensor descriptor


def _emptied(arg: Any) -> Any:
    """The place of a tensor to come: None, or a descriptor without a base in a descriptor's place."""
    return None if isinstance(arg, Tensor) else _filled(arg, None)


def _filled(descriptor: Any, base: Tensor | None) -> Any:
    """A copy of the descriptor with another base; `dataclasses.replace` would repeat its checks, which cost 5 us."""
    kind_of: Any = type(descriptor)
    same = kind_of.__new__(kind_of)
    same.__dict__.update(descriptor.__dict__)
    same.base = base
    return same
