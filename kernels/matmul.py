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
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from evalengine.kernels.cublaslt import Product
from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.launching.launch import Launch, Replay, cache_launch, launch, operand_key
from evalengine.kernels.matmul_device import Gpu, gpu_of
from evalengine.kernels.matmul_parts import load, multiply_add, rounded, tile_position
from evalengine.kernels.matmul_schedules import CUBLASLT, POINTER, REFERENCE, TMA, MatmulSchedule, choose

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


@triton.jit(do_not_specialize=["M"])
def _pointer_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, MASK_A: tl.constexpr, MASK_B: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Program: one tile of one batch entry.

    Rows and columns past the end repeat the first one (without a mask in the loop) or are masked; none is stored. They
    are masked where the operand is not contiguous along K (a repeated index would hide the contiguity along rows or
    columns), and where half of the tile's rows are past the end: loads of a repeated row cost traffic, masked ones
    none.
    """
    after_previous_kernel()
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row_block, column_block = tile_position(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row = row_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    row_in, column_in = row < M, column < N
    row_read = row if MASK_A else tl.where(row_in, row, 0)
    column_read = column if MASK_B else tl.where(column_in, column, 0)
    a_ptr += batch * stride_ab
    b_ptr += batch * stride_bb
    if SWAP:  # Everything is transposed: [N, K] x [K, M].
        a_pointers = a_ptr + row_read[None, :] * stride_am + k[:, None] * stride_ak
        b_pointers = b_ptr + column_read[:, None] * stride_bn + k[None, :] * stride_bk
        a_in, b_in, k_a, k_b = row_in[None, :], column_in[:, None], k[:, None], k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        a_pointers = a_ptr + row_read[:, None] * stride_am + k[None, :] * stride_ak
        b_pointers = b_ptr + column_read[None, :] * stride_bn + k[:, None] * stride_bk
        a_in, b_in, k_a, k_b = row_in[:, None], column_in[None, :], k[None, :], k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step_a, step_b = tl.cast(stride_ak, tl.int64) * BLOCK_K, tl.cast(stride_bk, tl.int64) * BLOCK_K
    for step in range(tl.cdiv(K, BLOCK_K)):
        left = K - step * BLOCK_K
        a = load(a_pointers, a_in, k_a < left, MASK_A, EVEN_K)
        b = load(b_pointers, b_in, k_b < left, MASK_B, EVEN_K)
        acc = multiply_add(a, b, acc, SWAP)
        a_pointers += step_a
        b_pointers += step_b
    c = rounded(acc, bias_ptr, column_block * BLOCK_N, N, BLOCK_N, SWAP,
                 a_ptr.dtype.element_ty, c_ptr.dtype.element_ty, ROUND_PRODUCT)  # fmt: skip
    row, column = (row[None, :], column[:, None]) if SWAP else (row[:, None], column[None, :])
    tl.store(c_ptr + (batch * M + row) * N + column, c, mask=(row < M) & (column < N))


def by_pointers(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, b_strides: tuple[int, ...], s: MatmulSchedule,
    round_product: bool,
) -> Launch | None:  # fmt: skip
    """c [(B,) M, N] = a [(B,) M, K] times b, whose strides over (B, K, N) are `b_strides`, + bias."""
    *batch, m, n = c.shape
    k = a.shape[-1]
    a_batch, (a_row, a_k) = a.stride(0) if batch else 0, a.stride()[-2:]
    b_batch, b_k, b_column = b_strides
    tiles = -(-m // s.block_m) * -(-n // s.block_n)
    grid = (tiles * (batch[0] if batch else 1), 1, 1)
    args = (a, b, bias, c, m, n, k, a_batch, a_row, a_k, b_batch, b_k, b_column)
    mask_a, even_k = a_k != 1 or s.masks_rows(m), k % s.block_k == 0
    constants = (s.block_m, s.block_n, s.block_k, s.group_m, s.swap, even_k, mask_a, b_k != 1, round_product)
    return launch(_pointer_kernel, grid, args, constants, s.num_warps, s.num_stages)


@triton.jit
def _store_tile(c_desc, c, row, column, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr):
    """Stores c [BLOCK_M, BLOCK_N] in SUBTILES = 1, 2 or 4 column parts, each of which needs that much less shared
    memory."""
    if SUBTILES == 1:
        c_desc.store([row, column], c)
    else:
        PART: tl.constexpr = BLOCK_N // 2
        left, right = c.reshape(c.shape[0], 2, PART).permute(0, 2, 1).split()
        _store_tile(c_desc, left, row, column, PART, SUBTILES // 2)
        _store_tile(c_desc, right, row, column + PART, PART, SUBTILES // 2)


@triton.jit
def _tma_tile(
    tile, a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, SUBTILES: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_position(tile, M, N, BLOCK_M, BLOCK_N + REST_N, GROUP_M)
    row, column = row_block * BLOCK_M, column_block * (BLOCK_N + REST_N)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    if REST_N == 0:
        for step in range(tl.cdiv(K, BLOCK_K)):
            a = a_desc.load([row, step * BLOCK_K])
            b = b_desc.load([column, step * BLOCK_K])
            acc = multiply_add(a.T, b, acc, SWAP) if SWAP else multiply_add(a, b.T, acc, SWAP)
    else:
        rest = tl.zeros((BLOCK_M, REST_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            a = a_desc.load([row, step * BLOCK_K])
            b = b_desc.load([column, step * BLOCK_K])
            more = b_rest.load([column + BLOCK_N, step * BLOCK_K])
            acc = multiply_add(a, b.T, acc, False)
            rest = multiply_add(a, more.T, rest, False)
        c = rounded(rest, bias_ptr, column + BLOCK_N, N, REST_N, False, a_desc.dtype, c_desc.dtype, ROUND_PRODUCT)
        c_rest.store([row, column + BLOCK_N], c)
    c = rounded(acc, bias_ptr, column, N, BLOCK_N, SWAP, a_desc.dtype, c_desc.dtype, ROUND_PRODUCT)
    _store_tile(c_desc, c.T if SWAP else c, row, column, BLOCK_N, SUBTILES)


@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, SUBTILES: tl.constexpr, PERSISTENT: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    """a [M, K] times b [N, K] (the weights' own layout) into c [M, N], all by descriptor: elements outside a tensor are
    read as 0 and not stored.

    A program computes one tile, or (PERSISTENT) every num_programs-th; the loads of its next tile then overlap the end
    of the tile before. A tile is BLOCK_N + REST_N columns wide, a sum of two powers of two, or BLOCK_N alone (REST_N =
    0; b_rest, c_rest: None): widths like 160 cut some N into one tile for every SM, where 128 or 256 would leave a
    third of the SMs idle.
    """
    after_previous_kernel()
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N + REST_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tma_tile(tile, a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
                      BLOCK_M, BLOCK_N, REST_N, BLOCK_K, GROUP_M, SWAP, SUBTILES, ROUND_PRODUCT)  # fmt: skip
    else:
        _tma_tile(tl.program_id(0), a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
                  BLOCK_M, BLOCK_N, REST_N, BLOCK_K, GROUP_M, SWAP, SUBTILES, ROUND_PRODUCT)  # fmt: skip


def by_descriptors(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    row_strides: tuple[int, int],
    s: MatmulSchedule,
    round_product: bool,
    multiprocessors: int,
) -> Replay | None:
    """c [M, N] = a [M, K] b^T + bias, b [N, K]; row_strides: a's and b's; multiprocessors: the GPU's number of SMs.

    Returns the same launch for other a, b, c (and bias), or None under the interpreter.
    """
    (m, k), n = a.shape, c.shape[1]
    a_row, b_column = row_strides
    tiles = -(-m // s.block_m) * -(-n // s.block_n)
    subtiles = s.subtiles * c.element_size() // 2  # Storing a float32 tile takes twice the shared memory.
    grid = (min(multiprocessors, tiles) if s.persistent else tiles, 1, 1)
    main, rest = s.columns
    blocks = (
        _descriptor(a, [m, k], a_row, [s.block_m, s.block_k]),
        _descriptor(b, [n, k], b_column, [main, s.block_k]),
        _descriptor(c, [m, n], n, [s.block_m, main // subtiles]),
        _descriptor(b, [n, k], b_column, [rest, s.block_k]) if rest else None,
        _descriptor(c, [m, n], n, [s.block_m, rest]) if rest else None,
    )
    constants = (s.block_m, main, rest, s.block_k, s.group_m, s.swap, subtiles, s.persistent, round_product)
    launched = launch(_tma_kernel, grid, (*blocks, bias, m, n, k), constants, s.num_warps, s.num_stages)
    if launched is None:
        return None
    replayer = launched.replayer(0, 1, 2, *([3, 4] if rest else []), *([5] if bias is not None else []))
    return (lambda a, b, c, *bias: replayer(a, b, c, b, c, *bias)) if rest else replayer


def _descriptor(base: Tensor, shape: list[int], row_stride: int, block_shape: list[int]) -> TensorDescriptor:
    return TensorDescriptor(base, shape, [row_stride, 1], block_shape)
