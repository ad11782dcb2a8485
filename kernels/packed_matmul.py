"""`native` products with packed weights: a step of few rows reads the packed bytes, and has the dense product's bytes.

    M rows, N columns, K the reduced dimension, G groups of a row's inputs; E experts, k of each token, P = T k pairs.

A number is unpacked in registers by the rule of `engine.load.unpacking`: code (less its zero) times scale in float32,
rounded once to the dtype of x. What is multiplied are thus the numbers of the unpacked weight, and the product is that
of `matmul.linear`: one float32 chain over K, ascending from +0, then the bias, then one rounding. Which tiles, and
whether the weight is unpacked to memory first (many rows, which compute more than they read) is schedule.

The product is a chain of mma.sync or wgmma, which have the same bytes as long as K is in order (NUMERICS.md); plain
Triton would give a thread the codes that one load brings, 4 or 8 in a row, and take each MMA's 16 columns from them in
another order. The Gluon kernel, `packed_matmul_kernel`, has the order in its weights' layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, packed_numbers
from evalengine.kernels.device_math import GLUON, after_previous_kernel
from evalengine.kernels.expert_groups import Groups
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.packed_rows import ROWS, WORDS, PackedForm, PackedFragments

# Rows up to which packed bytes are read in the product. More would unpack a number once for each 64 of them: with 128
# rows and mma.sync that took 0.75 to 1.1 of the time of unpacking to memory first.
FEW = 128
TALLEST = 64  # tile of an expert's rows, likewise
UNPACK_COLUMNS = 512  # of a program that unpacks a tile of the weight's rows to memory
WHOLE = 1 << 30  # the group of a row that has one scale
_launches: dict[tuple, Replay] = {}


@dataclass(frozen=True)
class PackedSchedule:
    """How a product is cut; no choice here changes a bit.

    block_m: rows of x in a program, at least 16 with one tile; tiles: of 8 weight rows in a warp, one for mma.sync or
    more for wgmma, whose warps are four or eight; block_k: K of one step, at least a fragment's; all powers of two.
    """

    block_m: int
    tiles: int
    block_k: int
    num_stages: int
    num_warps: int = 4


@triton.jit
def _of_columns(values, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Values [8, GROUPS] of groups -> [8, COLUMNS], of each one's columns."""
    spread = tl.broadcast_to(values[:, :, None], (8, GROUPS, COLUMNS // GROUPS))
    return tl.reshape(spread, (8, COLUMNS))


@triton.jit
def _unpack_kernel(
    words_ptr, scales_ptr, out_ptr, N, K, units, groups,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, SCALE_WORDS: tl.constexpr,
):  # fmt: skip
    """Program: COLUMNS columns of 8 rows."""
    after_previous_kernel()
    parts = tl.cdiv(units * UNIT, COLUMNS)
    tile, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    OWN: tl.constexpr = COLUMNS // UNIT
    unit = part * OWN + tl.arange(0, OWN)[:, None]
    place = (tile * units + unit) * 128 + tl.arange(0, 128)[None, :]
    words = tl.load(words_ptr + place, mask=unit < units, other=0)
    words = tl.reshape(words, (OWN, 8, 4, 4))
    halves = tl.join(words, words >> 16)
    if UNIT == 128:
        a, b, c, d = packed_numbers.halves_codes(halves, KIND)
        codes = tl.join(tl.join(a, b), tl.join(c, d))  # fragment, g, t, c, e, h, b
        codes = tl.permute(codes, (1, 0, 3, 6, 5, 2, 4))  # g, fragment, c, b, h, t, e
    else:
        codes = tl.join(halves & 0xFF, halves >> 8 & 0xFF)  # fragment, g, t, (c, b), h, e
        codes = tl.permute(codes, (1, 0, 3, 4, 2, 5))
    codes = tl.reshape(codes, (8, COLUMNS))

    GROUPS: tl.constexpr = COLUMNS // GROUP if GROUP < COLUMNS else 1
    group = part * COLUMNS // GROUP + tl.arange(0, GROUPS)[None, :]
    row = tl.arange(0, 8)[:, None]
    inside = group < groups
    if SCALE == "uint8":
        bytes_ptr = scales_ptr.to(tl.pointer_type(tl.uint8))
        scales = tl.load(bytes_ptr + (tile * groups + group) * 8 + row, mask=inside, other=0).to(tl.int32)
    else:
        scales = tl.load(scales_ptr + (tile * groups + group) * SCALE_WORDS + row, mask=inside, other=0)
    zeros = scales >> 16
    if SCALE_WORDS == 16:
        zeros = tl.load(scales_ptr + (tile * groups + group) * 16 + 8 + row, mask=inside, other=0)
    zeros = _of_columns(zeros, GROUPS, COLUMNS)
    factors = _of_columns(packed_numbers.factor(scales, SCALE), GROUPS, COLUMNS)
    numbers = packed_numbers.number(codes, zeros, KIND) * factors

    tiles = tl.cdiv(N, 8)
    row = (tile % tiles) * 8 + row
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = (tile // tiles * N + row) * K + column
    tl.store(out_ptr + place, numbers.to(out_ptr.dtype.element_ty), mask=(row < N) & (column < K))


def form_constants(form: PackedForm) -> tuple:
    """The kernels' last constexprs, which describe the weight."""
    scale = form.scale if form.zeros or form.scale == torch.uint8 else torch.float32
    return form.kind, str(scale).removeprefix("torch."), form.group or WHOLE, form.unit, form.scale_words


def unpack(weight: PackedFragments, out: Tensor) -> Tensor:
    """Writes the weight's numbers into `out`, contiguous, of its shape, in the dtype that products take."""
    n, k = weight.shape[-2:]
    varying = (*weight.tensors, out)
    key = ("unpack", *map(operand_key, varying), weight.form)
    if replayer := _launches.get(key):
        replayer(*varying)
        return out
    assert out.is_contiguous() and out.shape == weight.shape and all(x.is_contiguous() for x in weight.tensors)
    units, groups = weight.form.units(k)
    args = (*varying, n, k, units, groups)
    tiles = weight.words.numel() // (units * WORDS)
    grid = (tiles * -(-units * weight.form.unit // UNPACK_COLUMNS), 1, 1)
    launched = launch(_unpack_kernel, grid, args, (UNPACK_COLUMNS, *form_constants(weight.form)), 4, num_stages=1)
    if launched:
        cache_launch(_launches, key, launched.replayer(0, 1, 2))
    return out


def linear(x: Tensor, weight: PackedFragments, bias: Tensor | None, scratch: Tensor) -> Tensor:
    """x [M, K], bias [N] -> [M, N] in the dtype of x. scratch: room for the unpacked weight, in the dtype of x."""
    if len(x) <= FEW and fuses(x.dtype, weight.form):
        return fused(x, weight, bias, None)
    return matmul.linear(x, unpack(weight, _room(scratch, weight)), bias)


def expert_linear(x: Tensor, weight: PackedFragments, bias: Tensor | None, groups: Groups, scratch: Tensor) -> Tensor:
    """x [T, K], or [T, k, K] for a row a pair; bias [E, N] -> [T, k, N]; see `expert_matmul.expert_linear`."""
    if groups.block_m <= TALLEST and fuses(x.dtype, weight.form):
        return fused(x, weight, bias, groups)
    return expert_matmul.expert_linear(x, unpack(weight, _room(scratch, weight)), bias, groups)


# Forms whose products differed on this GPU (`verification.packed`): their weights are always unpacked to memory.
excluded: set = set()


def fuses(dtype: torch.dtype, form: PackedForm) -> bool:
    """Whether products of few rows in that dtype read the packed bytes."""
    return GLUON and dtype.itemsize == 2 and form not in excluded


def fused(
    x: Tensor,
    weight: PackedFragments,
    bias: Tensor | None,
    groups: Groups | None,
    schedule: PackedSchedule | None = None,
) -> Tensor:
    """The product whose kernel reads the packed bytes, in float16 and bfloat16; schedule: of the height of the groups'
    tiles."""
    from evalengine.kernels.packed_matmul_kernel import packed_kernel

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
    assert rows.shape[1] == k and rows.numel() < 1 << 31 and all(part.is_contiguous() for part in weight.tensors)
    s = schedule or (choose(len(rows), n) if groups is None else choose_for_experts(groups.block_m))
    assert block_m in (None, s.block_m)
    order, experts_tiles = tiles or (None, None)
    args = (
        rows, *weight.tensors, bias, y, order, experts_tiles, len(rows), n, k, rows.stride(0), *weight.form.units(k),
    )  # fmt: skip
    shared = 1 if groups is None or x.ndim == 3 else groups.chosen
    constants = (s.block_m, s.tiles, s.block_k, s.num_stages, shared, *form_constants(weight.form))
    count = -(-len(rows) // s.block_m) if groups is None else len(groups.tiles)
    grid = (count * -(-n // (ROWS * s.tiles * s.num_warps)), 1, 1)
    launched = launch(packed_kernel, grid, args, constants, s.num_warps, num_stages=1) if y.numel() else None
    if launched:
        places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        cache_launch(_launches, key, launched.replayer(*places))
    return y


def choose(rows: int, n: int) -> PackedSchedule:
    """The schedule for so many rows, up to FEW, and n columns: the fewer columns, the fewer of them in a program.

    Measured, as the experts', on an H200 with weights of four forms and shapes (results/reference/PROFILE.md).
    """
    if rows <= 16 and n <= 8192:
        return PackedSchedule(16, 1, 512, 3)
    if n <= 4224:  # 66 programs of 64 columns, half as many as an H200's SMs
        return PackedSchedule(16 if rows <= 32 else 32, 2, 256, 3)
    height = next(height for height in (8, 16, 32, 64) if rows <= height or height == 64)
    return PackedSchedule(height, 2, 128 if height == 64 and n > 8192 else 256, 3)


def choose_for_experts(block_m: int) -> PackedSchedule:
    """The schedule for experts' tiles of so many rows: programs of 128 columns, since x is read once for each."""
    return PackedSchedule(block_m, 4, 128, 4) if block_m < 64 else PackedSchedule(64, 2, 128, 3, num_warps=8)


def is_supported(device: torch.device) -> bool:
    """Whether weights may stay packed: on a GPU where the product's kernel was seen to have the dense bytes."""
    return device.type != "cuda" or (GLUON and torch.cuda.get_device_capability(device)[0] == 9)


def forget_launches() -> None:
    """Empties the memory of launches."""
    _launches.clear()


def _room(scratch: Tensor, weight: PackedFragments) -> Tensor:
    return scratch[: weight.shape.numel()].view(weight.shape)
