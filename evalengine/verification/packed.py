"""The comparison of products that read packed weights with those of the unpacked weight, when a model is loaded.

N columns, K the reduced dimension, E experts, of which a row has k.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, packed_matmul
from evalengine.kernels.expert_groups import group
from evalengine.kernels.packed_rows import PackedForm, PackedRows
from evalengine.verification import operands

logger = logging.getLogger(__name__)
ROWS = (1, 16, 17, 33, packed_matmul.FEW)  # of a step: those of every schedule, in tiles that are full and that are not
_compared: set[tuple[PackedForm, torch.Size, torch.dtype]] = set()


def verify_packed(weight: PackedRows, scratch: Tensor) -> None:
    """Compares, byte by byte, the first weight of every form and shape on a GPU. A form that differs is unpacked from
    then on, which a warning says. scratch: room for the unpacked weight, in the dtype of products."""
    key = (weight.form, weight.shape, scratch.dtype)
    if scratch.device.type != "cuda" or key in _compared:
        return
    _compared.add(key)
    if any(differs(weight, scratch, rows) for rows in ROWS):
        packed_matmul.excluded.add(weight.form)
        logger.warning(
            "products with weights packed as %s of %s differ from the unpacked ones on this GPU: such weights are "
            "unpacked in every step, which has the right bytes and takes longer; please report it",
            weight.form, list(weight.shape),
        )  # fmt: skip


def differs(weight: PackedRows, scratch: Tensor, rows: int) -> bool:
    """Whether a byte of the product of so many rows, or of tiles of so many, is another one by the packed weight."""
    random = operands.Random(scratch.dtype, scratch.device)
    dense = packed_matmul.unpack(weight, scratch[: weight.shape.numel()].view(weight.shape))
    x = random(rows, weight.shape[-1])
    if len(weight.shape) == 2:
        found = packed_matmul.fused(x, weight, None, None)
        expected = matmul.matmul(x, dense.t(), schedule=matmul.REFERENCE)
    else:
        experts = weight.shape[0]
        ids = (torch.arange(rows, dtype=torch.int32, device=x.device) % experts)[:, None]
        groups = group(ids, experts, packed_matmul.choose(rows, weight.shape[1]).block_m)
        found = packed_matmul.fused(x, weight, None, groups)
        expected = expert_matmul.expert_linear(x, dense, None, groups, expert_matmul.plainest(groups.block_m))
    return not torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
