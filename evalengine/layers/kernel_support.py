"""Tells in sentences why our Triton kernels cannot serve a device or a model, before any kernel is imported."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from evalengine.kernels.limits import HEAD_DIMS, MAX_TERMS

TENSOR_CORES = (8, 0)  # the compute capability from which bfloat16 tensor cores exist; flash-attn needs them, too


def kernel_problems(device: torch.device) -> list[str]:
    """A sentence for each reason why our Triton kernels cannot run on a device."""
    if device.type != "cuda":
        return [f"the kernels run on CUDA only, and this run's device is {device}"]
    problems = capability_problems(device)
    if find_spec("triton") is None:
        problems.append("the kernels are written in Triton, which is not installed: pip install triton")
    return problems


def head_dim_problems(head_dim: int | None) -> list[str]:
    """A sentence if our attention kernels do not take a model's head_dim (None: not known yet)."""
    smallest, largest = HEAD_DIMS
    if head_dim is None or (smallest <= head_dim <= largest and head_dim % 2 == 0):
        return []
    return [f"the attention kernels take an even head_dim from {smallest} to {largest}, and this model's is {head_dim}"]


def hidden_size_problems(hidden_size: int | None) -> list[str]:
    """A sentence if our RMSNorm does not take a model's hidden_size (None: not known yet)."""
    if hidden_size is None or hidden_size <= MAX_TERMS:
        return []
    return [f"the RMSNorm kernel takes a hidden_size up to {MAX_TERMS}, and this model's is {hidden_size}"]


def capability_problems(device: torch.device) -> list[str]:
    """A sentence if a CUDA device's compute capability is too low for our kernels and flash-attn's."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= TENSOR_CORES:
        return []
    return [
        "the kernels need bfloat16 tensor cores (compute capability 8.0, Ampere, or later), and this device's is "
        f"{major}.{minor}"
    ]
