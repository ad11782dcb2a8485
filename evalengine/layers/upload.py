"""Brings a step's integers to the device and its results back, without making the host wait for earlier work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 128  # bytes; arrays in the copied buffer are aligned for kernels as torch's allocator aligns tensors


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """A tensor for each array, in one copy from pinned memory.

    A copy from memory that is not pinned would wait for everything that the stream was given before. Torch keeps the
    pinned memory until the copy has been made. On a CPU the tensors are the arrays themselves.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    parts = host.split(sizes)
    for part, array in zip(parts, arrays, strict=True):
        part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(host.to(device, non_blocking=True).split(sizes), arrays, strict=True)
    ]


class Download:
    """Copies tensors to the host once the device has computed them."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """device: the tensors' device. Without tensors, `read` waits for its work all the same."""
        self._event: torch.cuda.Event | None = None
        self._host = list(tensors)
        if device.type == "cuda":
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def read(self) -> list[np.ndarray]:
        """The tensors as arrays; waits until they are copied."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._host]
