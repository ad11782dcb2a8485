"""`native` products with packed weights: a step of few rows reads the packed bytes, and has the dense product's bytes.

    M rows, N columns, K the reduced dimension, G groups of a row's inputs; E experts, k of each token, P = T k pairs.

A number is unpacked in registers by the rule of `engine.load.unpacking`: code (less its zero) times scale in float32,
rounded once to the dtype of x. What is multiplied are thus the numbers of the unpacked weight, and the product is that
of `matmul.linear`: one float32 chain over K, ascending from +0, then the bias, then one rounding. Which tiles, and
whether the weight is unpacked to memory first (many rows, which compute more than they read) is schedule.

A tile has 64 weight rows, so that Triton emits wgmma. With fewer it emits mma.sync and reorders K: it gives a thread
the codes that one load brings, 4 or 8 in a row, and takes each MMA's 16 columns from them in another order. On an H200
every tile of 64 rows has the dense bytes, and tiles of 32 rows differ in 2 to 7 of 24,576 numbers (NUMERICS.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul
from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.expert_groups import Groups
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.matmul_parts import load, multiply_add, rounded
from evalengine.kernels.packed_rows import PackedRows

# Rows up to which packed bytes are read in the product, and the tallest tile of an expert's rows: more rows would
# unpack a number once for each tile. Reckoned, not measured.
FEW = 256
TALLEST = 64
UNPACK_ROWS, UNPACK_COLUMNS = 16, 256  # of a program that unpacks a weight to memory
WEIGHT_ROWS = 64  # of a tile: those of a wgmma, the only instruction whose chain over K is the dense product's here
_launches: dict[tuple, Replay] = {}


@dataclass(frozen=True)
class PackedSchedule:
    """How a product is cut into tiles of WEIGHT_ROWS weight rows; no choice here changes a bit.

    block_m: rows of x in a tile; block_k: K of one pipeline step; both powers of two. A warp group of 4 warps computes
    64 weight rows; 8 warps share the tile's columns.
    """

    block_m: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        assert self.num_warps == 4 or (self.num_warps == 8 and self.block_m >= 64), "a warp group has 64 weight rows"


@triton.jit
def _codes(pointer, row, first, K, stride, HALVES: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """int32 [rows, BLOCK_K]: the numbers' codes from column `first` on, 0 past the end."""
    width: tl.constexpr = BLOCK_K // 2 if HALVES else BLOCK_K
    place = (first // 2 if HALVES else first) + tl.arange(0, width)[None, :]
    pointers = pointer + row[:, None] * stride + place
    if EVEN_K:
        stored = tl.load(pointers).to(tl.int32)
    else:
        stored = tl.load(pointers, mask=place < (K // 2 if HALVES else K), other=0).to(tl.int32)
    return tl.interleave(stored & 15, stored >> 4) if HALVES else stored


@triton.jit
def _of_groups(pointer, row, first, K, stride, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K], or [rows, 1] where a tile has one group: each column's scale or zero, 0 past the end."""
    if GROUP == 0:
        values = tl.load(pointer + row * stride)[:, None]
    elif GROUP >= BLOCK_K:
        values = tl.load(pointer + row * stride + first // GROUP)[:, None]
    else:
        group = first // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
        own = tl.load(pointer + row[:, None] * stride + group, mask=group < K // GROUP, other=0)
        spread = tl.broadcast_to(own[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP))
        values = tl.reshape(spread, (BLOCK_N, BLOCK_K))
    return values


@triton.jit
def _unpacked(
    codes_ptr, scales_ptr, zeros_ptr, row, first, K, stride_codes, stride_scales,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """float32 [rows, BLOCK_K]: the numbers from column `first` on; past the end anything finite."""
    codes = _codes(codes_ptr, row, first, K, stride_codes, KIND == "e2m1" or KIND == "int4", BLOCK_K, EVEN_K)
    if KIND == "e2m1":  # an exponent of 0: halves; else 1 or 1.5 times a power of two
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
        numbers = doubled.to(tl.float32) * tl.where(codes >= 8, -0.5, 0.5)
    elif KIND == "e4m3":  # as float32's bits these are 2^-120 times the number, subnormal ones too
        numbers = ((codes & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        numbers = tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers * tl.where(codes >= 128, -1.0, 1.0))
    else:
        zeros = _of_groups(zeros_ptr, row, first, K, stride_scales, GROUP, BLOCK_N, BLOCK_K)
        numbers = (codes - zeros.to(tl.int32)).to(tl.float32)
    scales = _of_groups(scales_ptr, row, first, K, stride_scales, GROUP, BLOCK_N, BLOCK_K)
    if scales_ptr.dtype.element_ty == tl.uint8:
        exponents = scales.to(tl.int32)
        scales = tl.where(exponents == 0, 0x00400000, exponents << 23).to(tl.float32, bitcast=True)
    return numbers * scales.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _packed_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, order_ptr, tiles_ptr, M, N, K,
    stride_x, stride_codes, stride_scales,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SHARED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_N columns of a tile of rows, the weights as the MMA's M side. Without `tiles` one weight has all
    rows in order; else see `expert_matmul`."""
    after_previous_kernel()
    column_blocks = tl.cdiv(N, BLOCK_N)
    tile, column_block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    place = tl.arange(0, BLOCK_M)
    if tiles_ptr is None:
        expert, first, rows = tl.cast(0, tl.int64), tile * BLOCK_M, tl.minimum(M - tile * BLOCK_M, BLOCK_M)
    else:
        expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
        first, rows = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if rows > 0:
        inside = place < rows
        if order_ptr is None:
            pair = (first + place).to(tl.int64)
        else:
            pair = tl.load(order_ptr + first + place, mask=inside, other=0).to(tl.int64)
        column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert * N + tl.where(column < N, column, 0)
        k = tl.arange(0, BLOCK_K)
        x_pointers = x_ptr + (pair // SHARED)[None, :] * stride_x + k[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            left = K - step * BLOCK_K
            x = load(x_pointers, inside[None, :], k[:, None] < left, True, EVEN_K)
            w = _unpacked(codes_ptr, scales_ptr, zeros_ptr, row, step * BLOCK_K, K, stride_codes, stride_scales,
                          KIND, GROUP, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip
            acc = multiply_add(x, w.to(x_ptr.dtype.element_ty), acc, True)
            x_pointers += BLOCK_K
        if bias_ptr is not None:
            bias_ptr += expert * N
        y = rounded(acc, bias_ptr, column_block * BLOCK_N, N, BLOCK_N, True,
                    x_ptr.dtype.element_ty, y_ptr.dtype.element_ty, False)  # fmt: skip
        mask = inside[None, :] & (column < N)[:, None]
        tl.store(y_ptr + pair[None, :] * N + column[:, None], y, mask=mask)


@triton.jit
def _unpack_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, ROWS, K, stride_codes, stride_scales,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    after_previous_kernel()
    parts = tl.cdiv(K, BLOCK_K)
    own = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) % parts * BLOCK_K
    row = tl.where(own < ROWS, own, 0)
    numbers = _unpacked(codes_ptr, scales_ptr, zeros_ptr, row, first, K, stride_codes, stride_scales,
                        KIND, GROUP, BLOCK_N, BLOCK_K, EVEN_K)  # fmt: skip
    column = first + tl.arange(0, BLOCK_K)[None, :]
    mask = (own < ROWS)[:, None] & (column < K)
    tl.store(out_ptr + row[:, None] * K + column, numbers.to(out_ptr.dtype.element_ty), mask=mask)


def unpack(weight: PackedRows, out: Tensor) -> Tensor:
    """Writes the weight's numbers into `out`, contiguous, of its shape, in the dtype that products take."""
    k = weight.shape[-1]
    key = ("unpack", *map(operand_key, (*weight.tensors, out)), weight.form)
    varying = (*weight.tensors, out)
    if replayer := _launches.get(key):
        replayer(*varying)
        return out
    assert out.is_contiguous() and out.shape == weight.shape and all(x.is_contiguous() for x in weight.tensors)
    rows = out.numel() // k
    args = (weight.codes, weight.scales, weight.zeros, out, rows, k, weight.codes.shape[-1], weight.scales.shape[-1])
    constants = (UNPACK_ROWS, UNPACK_COLUMNS, k % UNPACK_COLUMNS == 0, weight.form.kind, weight.form.group)
    grid = (-(-rows // UNPACK_ROWS) * -(-k // UNPACK_COLUMNS), 1, 1)
    launched = launch(_unpack_kernel, grid, args, constants, 4, num_stages=1)
    if launched:
        cache_launch(_launches, key, launched.replayer(0, 1, *([2] if weight.zeros is not None else []), 3))
    return out


def linear(x: Tensor, weight: PackedRows, bias: Tensor | None, scratch: Tensor) -> Tensor:
    """x [M, K], bias [N] -> [M, N] in the dtype of x. scratch: room for the unpacked weight, in the dtype of x."""
    if len(x) <= FEW and weight.form not in excluded:
        return fused(x, weight, bias, None)
    return matmul.linear(x, unpack(weight, _room(scratch, weight)), bias)


def expert_linear(x: Tensor, weight: PackedRows, bias: Tensor | None, groups: Groups, scratch: Tensor) -> Tensor:
    """x [T, K], or [T, k, K] for a row a pair; bias [E, N] -> [T, k, N]; see `expert_matmul.expert_linear`."""
    if groups.block_m <= TALLEST and weight.form not in excluded:
        return fused(x, weight, bias, groups)
    return expert_matmul.expert_linear(x, unpack(weight, _room(scratch, weight)), bias, groups)


# Forms whose products differed on this GPU (`verification.packed`): their weights are always unpacked to memory.
excluded: set = set()


def fused(
    x: Tensor, weight: PackedRows, bias: Tensor | None, groups: Groups | None, schedule: PackedSchedule | None = None
) -> Tensor:
    """The product whose kernel reads the packed bytes; schedule: of the height of the groups' tiles."""
    *_, n, k = weight.shape
    rows = x.contiguous().flatten(0, -2)
    y = torch.empty(
        (*(x.shape[:1] if groups is None else (x.shape[0], groups.chosen)), n), dtype=x.dtype, device=x.device
    )
    tiles = () if groups is None else (groups.order, groups.tiles)
    block_m = None if groups is None else groups.block_m
    operands = (rows, *weight.tensors, *([] if bias is None else [bias]), y, *tiles)
    key = (*map(operand_key, operands), weight.form, block_m, schedule)
    if replayer := _launches.get(key):
        replayer(*operands)
        return y
    assert rows.shape[1] == k and all(part.is_contiguous() for part in weight.tensors)
    s = schedule or choose(block_m or len(rows))
    assert block_m in (None, s.block_m)
    order, experts_tiles = tiles or (None, None)
    args = (
        rows, *weight[:3], bias, y, order, experts_tiles, len(rows), n, k,
        rows.stride(0), weight.codes.shape[-1], weight.scales.shape[-1],
    )  # fmt: skip
    shared = 1 if groups is None or x.ndim == 3 else groups.chosen
    constants = (s.block_m, WEIGHT_ROWS, s.block_k, k % s.block_k == 0, shared, weight.form.kind, weight.form.group)
    count = -(-len(rows) // s.block_m) if groups is None else len(groups.tiles)
    grid = (count * -(-n // WEIGHT_ROWS), 1, 1)
    launched = launch(_packed_kernel, grid, args, constants, s.num_warps, s.num_stages) if y.numel() else None
    if launched:
        places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        cache_launch(_launches, key, launched.replayer(*places))
    return y


def choose(rows: int) -> PackedSchedule:
    """The schedule for so many rows, up to FEW, or for tiles of so many."""
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    if block_m == 16:  # narrow and deep: codes are few bytes, of which enough must be on their way
        return PackedSchedule(16, 256, num_stages=4)
    return PackedSchedule(block_m, 128, num_warps=4 if block_m <= 64 else 8)


def is_supported(device: torch.device) -> bool:
    """Whether the kernels can have the dense product's bytes: on a GPU only through wgmma, which is Hopper's."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def forget_launches() -> None:
    """Empties the memory of launches."""
    _launches.clear()


def _room(scratch: Tensor, weight: PackedRows) -> Tensor:
    return scratch[: weight.shape.numel()].view(weight.shape)
