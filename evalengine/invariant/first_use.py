"""The mode's products on CUDA: each schedule is compared with the reference schedule before it is first used.

The engine has `verify` compare a model's shapes when it starts. The mode meets its shapes one by one: the first time a
schedule is chosen, and for each way in which it goes (masked rows, strides, a bias, ...), it and the reference schedule
multiply random numbers of the operands' shapes. One that differs, or does not run, is dropped, for the engine too. On a
GPU whose small and large tiles take different instructions that is what keeps the promise. The row kernels need none
of this: no schedule of theirs adds numbers in another order.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from evalengine.kernels import matmul as products
from evalengine.kernels.launching.launch import MAX_REMEMBERED, kind
from evalengine.kernels.matmul_device import gpu_of
from evalengine.verification.products import MAX_ROWS
from evalengine.verification.verdict import Verdict

logger = logging.getLogger(__name__)

_compared: set[tuple] = set()  # ways
_unproved: set[tuple] = set()  # ways for whose comparison there was no memory: the reference schedule goes instead
_known: set[tuple] = set()  # kinds of operands whose way is one of these: nothing is worked out again


def multiply(product: partial[Tensor], *operands: Tensor) -> Tensor:
    """`product(a, b)`, or (a, b, bias), of `kernels.matmul`; on CUDA by a schedule that was compared."""
    return checked(product, *operands) if operands[0].is_cuda else product(*operands)


def checked(product: partial[Tensor], *operands: Tensor) -> Tensor:
    """`product` of these, by a schedule that was compared; by the reference where none can be at the moment."""
    a, b, *_ = operands
    options = tuple(product.keywords.values())
    kinds = (*map(kind, operands), *options)
    if kinds in _known or 0 in a.shape or 0 in b.shape:
        return product(*operands)
    plain = len(operands) == 2 and not product.keywords.get("round_product")
    schedule = products.schedule_for(a, b, product.keywords.get("out_dtype"), plain)
    way = (*_way(schedule, a, b), len(operands), *options)
    if schedule != products.REFERENCE and way not in _compared:
        capturing = a.is_cuda and torch.cuda.is_current_stream_capturing()  # nothing can be read before the graph runs
        if capturing or way in _unproved:
            return product(*operands, schedule=products.REFERENCE)
        try:
            _compare(product, schedule, operands)
        except torch.OutOfMemoryError:
            logger.warning("no memory to compare the schedule %s: products take the reference schedule", schedule)
            _unproved.add(way)
            return product(*operands, schedule=products.REFERENCE)
        _compared.add(way)
    if len(_known) >= MAX_REMEMBERED:
        _known.clear()
    _known.add(kinds)
    return product(*operands)


def _way(schedule: products.Schedule, a: Tensor, b: Tensor) -> tuple:
    """What tells the compiled kernels of a schedule apart, and whether a persistent one loops."""
    device = a.get_device()
    loops = schedule.loops(a.shape[-2], b.shape[-1], gpu_of(device).multiprocessors)
    even_k = a.shape[-1] % schedule.block_k == 0
    k_strides = (a.stride(-1) == 1, b.stride(-2) == 1)
    return (schedule, schedule.masks_rows(a.shape[-2]), loops, even_k, k_strides, a.ndim, a.dtype, device)


def _compare(product: partial[Tensor], schedule: products.Schedule, operands: tuple[Tensor, ...]) -> None:
    """On random numbers: what a program multiplies first may well be zeros, which prove nothing."""
    a, b, *bias = operands
    rows = min(a.shape[-2], MAX_ROWS)
    if schedule.loops(a.shape[-2], b.shape[-1], gpu_of(a.get_device()).multiprocessors):
        rows = a.shape[-2]
    left, right = a[..., :rows, :], b
    if a.ndim == 3:
        left, right = left[:2], right[:2]
    generator = torch.Generator(a.device).manual_seed(0)
    random = [_random_like(x, generator) for x in (left, right, *bias)]
    where = f"{list(left.shape)} by {list(right.shape)} {a.dtype}, before its first use"
    run = partial(product, *random)
    Verdict().compare("matmul", schedule, where, partial(run, schedule=schedule), run(schedule=products.REFERENCE))


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers, contiguous along the dimension along which x is, with rows that a descriptor can address."""
    across = x.ndim > 1 and x.stride(-1) != 1
    *outer, width = x.mT.shape if across else x.shape
    made = torch.randn(*outer, -(-width // 8) * 8, generator=generator, device=x.device, dtype=x.dtype)[..., :width]
    return made.mT if across else made
