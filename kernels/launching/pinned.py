"""Small tensors on their way to the device, without the host waiting for what the device was given before."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor, which lies on the host, on `device`: from pinned memory, which torch keeps until it has been copied.

    A copy from other memory may wait for the stream.
    """
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
