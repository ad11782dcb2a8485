"""The comparison of products that read packed weights with those of the unpacked weight, when a model is loaded.

    N columns, K the reduced dimension, E experts.

Unpacking to memory is compared with torch's, on some rows, and the product with the dense kernel's. What differs or
does not run is not used: such a form's weights are unpacked in every step, or, if that differs too, as they are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, packed_matmul
from evalengine.kernels.expert_groups import group
from evalengine.kernels.packed_rows import PackedForm, PackedFragments, PackedRows, fragments_of, unpacked_by_torch
from evalengine.verification import operands

logger = logging.getLogger(__name__)
DENSE_ROWS = (1, 16, 17, 33, 65)  # those of every schedule, in tiles that are full and that are not
HEIGHTS = (16, 32, packed_matmul.TALLEST)  # of experts' tiles
SOME = 64  # rows of a weight that torch unpacks
_compared: dict[tuple[PackedForm, torch.Size, torch.dtype, bool], str] = {}  # what was found, "" for nothing
_unreadable: set[PackedForm] = set()


def verified(rows: PackedRows, scratch: Tensor, biased: bool = False) -> PackedFragments | Tensor:
    """The weight in fragments, or its numbers where this GPU does not unpack it rightly; the first of every form and
    shape, with biases and without, is compared. scratch: room for the unpacked weight, in the dtype of products."""
    weight = fragments_of(rows)
    key = (weight.form, weight.shape, scratch.dtype, biased)
    if key not in _compared:
        wrong = _reason(lambda: _unpacks_otherwise(rows, weight, scratch))
        if wrong:
            _unreadable.add(weight.form)
        elif packed_matmul.fuses(scratch.dtype, weight.form) and (
            wrong := _reason(lambda: _multiplies_otherwise(weight, scratch, biased))
        ):
            packed_matmul.excluded.add(weight.form)
        _compared[key] = wrong and f"weights packed as {weight.form} of {list(weight.shape)}: {wrong}"
        if wrong:
            logger.warning("%s; they are unpacked, which has the right bytes; please report it", _compared[key])
    if weight.form not in _unreadable:
        return weight
    return unpacked_by_torch(rows).to(scratch.dtype)


def packed_verdict() -> dict[str, Any]:
    """{"compared": n, "dropped": [a sentence each]}, plain JSON values, of this process so far."""
    return {"compared": len(_compared), "dropped": [text for text in _compared.values() if text]}


def _reason(compare: Callable[[], str]) -> str:
    """The result of a comparison, or why it does not run."""
    try:
        return compare()
    except torch.OutOfMemoryError:  # no fault of the kernel
        raise
    except Exception as error:
        return f"does not run: {type(error).__name__}: {error}"[:300]


def _unpacks_otherwise(rows: PackedRows, weight: PackedFragments, scratch: Tensor) -> str:
    found = packed_matmul.unpack(weight, scratch[: weight.shape.numel()].view(weight.shape)).flatten(0, -2)[:SOME]
    codes, scales, zeros = (None if x is None else x.flatten(0, -2)[:SOME] for x in rows[:3])
    assert codes is not None and scales is not None
    some = PackedRows(codes, scales, zeros, rows.form)
    return "" if _same(found, unpacked_by_torch(some).to(found.dtype)) else "unpacking differs"


def _multiplies_otherwise(weight: PackedFragments, scratch: Tensor, biased: bool) -> str:
    random = operands.Random(scratch.dtype, scratch.device)
    bias = random(*weight.shape[:-1]) if biased else None
    dense = packed_matmul.unpack(weight, scratch[: weight.shape.numel()].view(weight.shape))
    for rows in DENSE_ROWS if len(weight.shape) == 2 else HEIGHTS:
        x = random(rows + rows // 2, weight.shape[-1]) if len(weight.shape) == 3 else random(rows, weight.shape[-1])
        if len(weight.shape) == 2:
            found = packed_matmul.fused(x, weight, bias, None)
            expected = matmul.matmul(x, dense.t(), bias, schedule=matmul.REFERENCE)
        else:
            ids = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None] // rows % weight.shape[0]
            groups = group(ids.contiguous(), weight.shape[0], rows)
            found = packed_matmul.fused(x, weight, bias, groups)
            expected = expert_matmul.expert_linear(x, dense, bias, groups, expert_matmul.plainest(rows))
        if not _same(found, expected):
            return f"products of {rows} rows differ"
    return ""


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
