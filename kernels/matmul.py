"""`native` matrix products: one arithmetic for every shape and every tile.

    M rows, N columns, K the reduced dimension, B batch; T tokens.

The arithmetic (the numerics contract's `native` linear), per output element:

* one float32 chain over K, ascending from +0, by the tensor core's multiply-accumulate
  (`acc = dot(a_tile, b_tile, acc)`); float32 inputs by IEEE fused multiply-adds, never TF32;
* then `+ bias` in float32;
* then **one rounding to the output's dtype**. `round_product` rounds the product to the inputs' dtype before the bias
  is added, and the sum once more: `matmul` then `add`, as torch.addmm must be where both are overridden.

K is never split, and there are no partial sums. The schedule (kernels/matmul_schedules.py) may choose tile sizes,
warps, stages, which operand is the MMA's M side, TMA or pointer loads, persistence, or cuBLASLt. A K tail is filled
with zeros, which change nothing. Zeros are +0; only a negative number too small for the output's dtype gives -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels.cublaslt import Product
from evalengine.kernels.launching.launch import Replay, cache_launch, operand_key
from evalengine.kernels.matmul_device import Gpu, gpu_of
from evalengine.kernels.matmul_pointer import by_pointers
from evalengine.kernels.matmul_schedules import CUBLASLT, POINTER, REFERENCE, TMA, MatmulSchedule, choose
from evalengine.kernels.matmul_tma import by_descriptors

__all__ = ["REFERENCE", "MatmulSchedule", "bmm", "choose", "linear", "matmul"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_launches: dict[tuple, Replay] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> x weight^T + bias [T, N], contiguous, in `out_dtype` (default: x's).

    The engine's entry: `matmul(x, weight.t(), bias)` without making the view.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    return _product(x, weight, bias, out_dtype, transposed=True)


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    round_product: bool = False,
    schedule: MatmulSchedule | None = None,
) -> Tensor:
    """a [M, K], b [K, N], bias [N] -> a b + bias [M, N], contiguous, in `out_dtype` (default: a's).

    Any strides. bf16, fp16 or fp32, both operands alike. round_product: a b is rounded to a's dtype before the bias is
    added. schedule: by default the one `choose` names.
    Raises ValueError for shapes or dtypes that do not fit, or a schedule "tma" for operands that do not qualify.
    """
    return _product(a, b, bias, out_dtype, False, round_product, schedule)


def bmm(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, schedule: MatmulSchedule | None = None
) -> Tensor:
    """a [B, M, K], b [B, K, N] -> [B, M, N], contiguous; each entry has the bytes of `matmul`.

    Any strides, expanded (0) ones too. schedule: of the form "pointer".
    Raises ValueError for shapes or dtypes that do not fit, or another schedule.
    """
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"cannot multiply {list(a.shape)} by {list(b.shape)}: the batches differ")
    return _product(a, b, None, out_dtype, schedule=schedule)


def schedule_for(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, plain: bool = True) -> MatmulSchedule:
    """The schedule that `matmul(a, b)`, or `bmm`, takes; plain: without a bias and `round_product`."""
    gpu, (k, n) = gpu_of(a.get_device()), b.shape[-2:]
    aligned = _aligned(a, b, b.stride(-1), b.stride(-2), n, out_dtype or a.dtype)
    return choose(gpu.name, a.dtype, a.shape[-2], n, k, *gpu.forms(aligned, plain))


def _product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    transposed: bool = False,
    round_product: bool = False,
    schedule: MatmulSchedule | None = None,
) -> Tensor:
    """a [(B,) M, K] times b [(B,) K, N], or [N, K] if it is `transposed`.

    A launch for operands of the same kinds is repeated as it was. A layer launches four products one by one at decode:
    on an H200's host a repeated launch takes about as long as torch.mm, where choosing and launching anew took 38 us.
    """
    key = (operand_key(a), operand_key(b), operand_key(bias), out_dtype, transposed, round_product, schedule)
    replayer = _launches.get(key)
    n = b.shape[-2 if transposed else -1]
    if replayer is not None:
        c = torch.empty((*a.shape[:-1], n), dtype=out_dtype or a.dtype, device=a.device)
        if bias is None:
            replayer(a, b, c)
        else:
            replayer(a, b, c, bias)
        return c
    k = b.shape[-1 if transposed else -2]
    b_strides = (b.stride(0) if b.ndim > 2 else 0, *(b.stride()[::-1] if transposed else b.stride()[-2:]))
    *batch, m, a_k = a.shape
    dtype, device = a.dtype, a.get_device()
    if a_k != k or b.dtype != dtype or dtype not in DTYPES or b.get_device() != device:
        raise ValueError(f"cannot multiply {_described(a)} by {[*batch, k, n]} of {b.dtype} on {b.device}")
    as_given = bias is None or bias.is_contiguous()
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"the bias of {n} columns is a [{n}], not {_described(bias)}")
        bias = bias.contiguous()
    c = torch.empty((*batch, m, n), dtype=out_dtype or dtype, device=a.device)
    if c.numel() == 0:
        return c
    gpu = gpu_of(device)
    aligned = _aligned(a, b, b_strides[2], b_strides[1], n, c.dtype)
    tma_ok, cublaslt_ok = gpu.forms(aligned, plain=bias is None and not round_product)
    if schedule is None:
        schedule = choose(gpu.name, dtype, m, n, k, tma_ok, cublaslt_ok)
    elif not _suits(schedule, tma_ok, cublaslt_ok):
        raise ValueError(
            f"{_described(a)} by {[*batch, k, n]} does not qualify for a schedule of the form {schedule.form}"
        )
    launched = _launch(a, b, bias, c, b_strides, schedule, round_product, gpu)
    if launched and as_given:
        cache_launch(_launches, key, launched)
    return c


def forget_launches() -> None:
    """Empties the memory of launches, whose schedules may be excluded by now."""
    _launches.clear()


def _launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    b_strides: tuple[int, ...],
    s: MatmulSchedule,
    round_product: bool,
    gpu: Gpu,
) -> Replay | None:
    """Runs the product; returns the same launch for other a, b, c (and bias), or None under the interpreter."""
    row_strides = a.stride(-2), b_strides[2]
    if s.form == CUBLASLT:
        assert gpu.cublaslt is not None, "choose() names it where it is"
        run = gpu.cublaslt.product(
            Product(c.shape[0], s.block_m, c.shape[1], a.shape[1], row_strides, a.dtype, c.dtype)
        )
        run(a, b, c)
        return run
    if s.form == TMA:
        return by_descriptors(a, b, bias, c, row_strides, s, round_product, gpu.multiprocessors)
    launched = by_pointers(a, b, bias, c, b_strides, s, round_product)
    return None if launched is None else launched.replayer(0, 1, 3, *([2] if bias is not None else []))


def _aligned(a: Tensor, b: Tensor, b_column: int, b_k: int, n: int, out_dtype: torch.dtype) -> bool:
    """Whether rows lie as tensor descriptors and cuBLASLt need them; b_column, b_k: b's strides over N and K."""
    k = a.shape[-1]
    return (
        a.ndim == 2 and k > 0 and a.dtype != torch.float32
        and _rows_aligned(a, a.stride(0), a.stride(1), k) and _rows_aligned(b, b_column, b_k, k)
        and n * out_dtype.itemsize % 16 == 0
    )  # fmt: skip


def _suits(schedule: MatmulSchedule, tma_ok: bool, cublaslt_ok: bool) -> bool:
    return schedule.form == POINTER or (tma_ok if schedule.form == TMA else cublaslt_ok)


def _rows_aligned(x: Tensor, row_stride: int, k_stride: int, k: int) -> bool:
    """Whether a descriptor may address x: contiguous along K, rows apart, each at a multiple of 16 bytes."""
    return k_stride == 1 and row_stride >= k and row_stride % 8 == 0 and x.data_ptr() % 16 == 0


def _described(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype} on {x.device}"
