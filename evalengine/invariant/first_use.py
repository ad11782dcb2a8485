"""Computes the mode's products on CUDA, and compares each schedule with the reference schedule before its first use.

The engine has `verify` compare the schedules for a model's shapes when it starts. The mode meets its shapes one by one.
The first time a schedule is chosen, and again for each way of running it (masked rows, strides, a bias, ...), the
schedule and the reference schedule multiply random numbers of the operands' shapes. A schedule whose result differs,
or that does not run, is dropped, for the engine too. On a GPU whose small and large tiles take different instructions
this keeps the promise. The row kernels need no comparison: none of their schedules adds numbers in another order.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from evalengine.kernels import matmul as products
from evalengine.kernels.launching.launch import MAX_CACHED_LAUNCHES, operand_key
from evalengine.kernels.matmul_device import gpu_of
from evalengine.verification.products import MAX_ROWS
from evalengine.verification.verdict import KernelsVerdict

logger = logging.getLogger(__name__)

_compared: set[tuple] = set()  # ways (see `_way`) that have been compared
_unproved: set[tuple] = set()  # ways for whose comparison there was no memory: the reference schedule runs instead
_known: set[tuple] = set()  # kinds of operands whose way is compared, so that it is not worked out again


def multiply(product: partial[Tensor], *operands: Tensor) -> Tensor:
    """`product(a, b)` or `product(a, b, bias)` of `kernels.matmul`; on CUDA by a schedule that was compared."""
    return checked(product, *operands) if operands[0].is_cuda else product(*operands)


def checked(product: partial[Tensor], *operands: Tensor) -> Tensor:
    """`product` of the operands by a schedule that was compared, or by the reference schedule where no comparison is
    possible at the moment."""
    a, b, *_ = operands
    options = tuple(product.keywords.values())
    kinds = (*map(operand_key, operands), *options)
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
    if len(_known) >= MAX_CACHED_LAUNCHES:
        _known.clear()
    _known.add(kinds)
    return product(*operands)


def _way(schedule: products.MatmulSchedule, a: Tensor, b: Tensor) -> tuple:
    """A key of everything that makes a schedule compile to another kernel, and of whether a persistent kernel loops."""
    device = a.get_device()
    loops = schedule.loops(a.shape[-2], b.shape[-1], gpu_of(device).multiprocessors)
    even_k = a.shape[-1] % schedule.block_k == 0
    k_strides = (a.stride(-1) == 1, b.stride(-2) == 1)
    return (schedule, schedule.masks_rows(a.shape[-2]), loops, even_k, k_strides, a.ndim, a.dtype, device)


def _compare(product: partial[Tensor], schedule: products.MatmulSchedule, operands: tuple[Tensor, ...]) -> None:
    """Compares a schedule with the reference on random numbers: a program's own first operands may well be zeros, which
    prove nothing."""
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
    KernelsVerdict().compare(
        "matmul", schedule, where, partial(run, schedule=schedule), run(schedule=products.REFERENCE)
    )


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal random numbers in the shape of x, contiguous along the same dimension, with rows that a tensor descriptor
    can address."""
    across = x.ndim > 1 and x.stride(-1) != 1
    *outer, width = x.mT.shape if across else x.shape
    numbers = torch.randn(*outer, -(-width // 8) * 8, generator=generator, device=x.device, dtype=x.dtype)[..., :width]
    return numbers.mT if across else numbers
