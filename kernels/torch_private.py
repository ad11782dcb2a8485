"""Every private name of torch that this package uses, seen at work in torch 2.11 (CUDA) and 2.13 (CPU).

`FIXES` says of each what to do in a version without it, and tests/kernels/test_torch_private.py looks for each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "without_modes"]

FIXES = {
    "torch._C._cuda_getDevice": "nothing: torch.cuda.current_device() takes its place, and three times as long",
    "torch._C._cuda_getCurrentRawStream": "nothing: torch.cuda.current_stream() takes its place, and longer",
    "torch._C._are_functorch_transforms_active": "ask torch._functorch for the current transform (`transformed`)",
    "torch.autograd.forward_ad._current_level": "ask for the level of forward-mode differentiation (`transformed`)",
    "torch._C._AutoDispatchBelowAutograd": "take torch._C._ExcludeDispatchKeyGuard (`below_autograd`)",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "take OpOverload.has_kernel_for_dispatch_key (`has_kernel`)",
    "torch._C.DispatchKey.CompositeImplicitAutograd": "take torch.DispatchKey (`by_key`)",
    "torch.ops.aten.mm.default._op_dk": "take OpOverload.redispatch with a key set (`by_key`)",
    "torch.ops.aten.mm.default._schema": "take OpOverload.schema, or parse str(overload) (`schema_of`)",
    "torch.ops.aten.mm.default._overloadname": "take the end of str(overload) (`overload_of`)",
    "torch.library.Library._destroy": "drop all references to the library and collect it (`destroy`)",
    "torch.utils._python_dispatch._disable_current_modes": "pop the modes one by one (`without_modes`)",
    "torch.distributed.ProcessGroup._allgather_base": "take the group's all_gather_into_tensor (`gather_bytes`)",
    "torch.distributed.ProcessGroupGloo._Options": "take ProcessGroupGloo.Options (`gloo_options`)",
}
without_modes = _disable_current_modes
# Called at every launch, where torch.cuda's own would first look whether CUDA is in use.
current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def transformed() -> bool:
    """Whether forward-mode differentiation or a transform of torch.func is under way."""
    return bool(forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def below_autograd() -> AbstractContextManager[Any]:
    """In it ops skip autograd, but not what lies below it in the dispatcher."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


def by_key(overload: Any, key: str, *args: Any, **options: Any) -> Any:
    """The result of the kernel that is registered for this key of the dispatcher, whatever overrides it."""
    return overload._op_dk(getattr(torch._C.DispatchKey, key), *args, **options)


def has_kernel(overload: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key))


def schema_of(overload: Any) -> Any:
    """`name` ("aten::mm"), `arguments` and `returns`."""
    return overload._schema


def overload_of(overload: Any) -> str:
    return str(overload._overloadname)


def destroy(library: Any) -> None:
    """Takes the library's kernels out of the dispatcher at once."""
    library._destroy()


def gather_bytes(group: Any, parts: Tensor, own: Tensor) -> None:
    """Every rank's `own` into `parts`, in the order of the ranks."""
    group._allgather_base(parts, own).wait()


def gloo_options(hostname: str, timeout: timedelta) -> Any:
    """Options of a group of CPU ranks that listen at this address only."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=hostname)]
    options._timeout = timeout
    return options


def nccl_options(timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options
