"""Copies small tensors to the device without making the host wait for the work queued there before."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a tensor on the host, made from pinned memory, which torch keeps until the copy is done.

    A copy from memory that is not pinned may wait for the stream.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
