"""Connects the ranks of one model, so that they can exchange tensors."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evalengine.config.schema import EngineConfig
from evalengine.kernels.torch_private import gloo_options, nccl_options
from evalengine.layers.ops import Ops
from evalengine.layers.parallel import TensorParallel
from evalengine.models.spec import ModelSpec
from evalengine.models.widths import widths

# How long a rank waits for another in a collective. A rank that dies is noticed at once, one that is stopped soon
# (`ranks.SECONDS_STOPPED`); this is for one that hangs.
PATIENCE = timedelta(minutes=10)


def connect(folder: Path, rank: int, size: int, device: torch.device) -> TensorParallel:
    """This rank's collectives, once every rank has called: NCCL on CUDA, gloo on a CPU.

    folder: an empty folder that only the ranks see, in which they leave their addresses. The groups are this
    model's own: torch's default process group, which the program around may use, is neither needed nor touched.
    """
    store = dist.FileStore(str(folder / "rendezvous"), size)
    if device.type == "cuda":
        group: Any = dist.ProcessGroupNCCL(store, rank, size, nccl_options(PATIENCE))
    else:  # an address that is closed to other machines
        group = dist.ProcessGroupGloo(store, rank, size, gloo_options("127.0.0.1", PATIENCE))
    tp = TensorParallel(rank, size, group)
    tp.broadcast(torch.zeros(1, device=device))  # NCCL connects at the first collective
    return tp


def slot_bytes(config: EngineConfig, spec: ModelSpec, ops: Ops) -> int:
    """The most bytes that a layer gathers: the widest features of all tokens of a step."""
    sizes = widths(spec)
    widest = max(sizes.hidden, sizes.inner, sizes.heads)
    return config.max_num_batched_tokens * widest * ops.activation_dtype.itemsize


def share_memory(ops: Ops, slot_bytes: int) -> None:
    """Has the GPUs gather through shared memory where layers gather, if they can (`TensorParallel.share_memory`)."""
    if ops.tp.size > 1 and ops.device.type == "cuda" and not ops.sums_cross_ranks:
        ops.tp.share_memory(slot_bytes, ops.device)
