"""Which tiles a matrix product is cut into. No choice here changes a bit of the result (kernels/matmul.py); it only
changes the time, so it may depend on anything.

`choose` takes, in this order: the row of `matmul_table.json` for the GPU and the shape [N, K] (made by `python -m
evalengine bench matmul --tune`), the row of the nearest shape tuned on that GPU, or `heuristic`. A row holds one
schedule per bucket of M: the next power of two, at most MAX_BUCKET.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

TABLE = Path(__file__).with_name("matmul_table.json")
MAX_BUCKET = 8192
Form = Literal["pointer", "tma"]
POINTER: Form = "pointer"
TMA: Form = "tma"


@dataclass(frozen=True)
class Schedule:
    """How the output [M, N] is cut into tiles and how a tile is computed.

    form: "pointer" (any strides, batches) or "tma" (tensor descriptors: both operands K-contiguous, rows 16-byte
    aligned; Hopper or newer). block_m, block_n: rows and columns of a tile; block_k: K of one pipeline step. swap: the
    weights are the MMA's 64-row side, for few rows. persistent (tma): one program per SM walks over tiles. group_m:
    tiles of that many row blocks are taken column by column, so that both operands are met in L2. subtiles (tma): the
    tile is stored in that many parts, which frees shared memory for more stages.
    """

    form: Form
    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    swap: bool = False
    persistent: bool = False
    group_m: int = 8
    subtiles: int = 1

    def __str__(self) -> str:
        """Compact and readable, the table's form: "tma 128x256x64 w8 s3 g8 persistent"."""
        flags = (
            " swap" * self.swap + " persistent" * self.persistent + f" subtiles{self.subtiles}" * (self.subtiles > 1)
        )
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.form} {tile} w{self.num_warps} s{self.num_stages} g{self.group_m}{flags}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of str(); raises ValueError for anything else."""
        pattern = r"(pointer|tma) (\d+)x(\d+)x(\d+) w(\d+) s(\d+) g(\d+)( swap)?( persistent)?(?: subtiles(\d+))?"
        if not (found := re.fullmatch(pattern, text)):
            raise ValueError(f"not a matmul schedule: {text!r}")
        form, *sizes, swap, persistent, subtiles = found.groups()
        block_m, block_n, block_k, warps, stages, group = map(int, sizes)
        return cls(
            TMA if form == TMA else POINTER, block_m, block_n, block_k, warps, stages,
            bool(swap), bool(persistent), group, int(subtiles or 1),
        )  # fmt: skip


REFERENCE = Schedule(POINTER, 64, 64, 32, num_warps=4, num_stages=2)
excluded: set[Schedule] = set()  # what kernels/verify.py found wrong on this GPU: never chosen in this process


def bucket(m: int) -> int:
    """The next power of two, at most MAX_BUCKET."""
    return min(MAX_BUCKET, 1 << (m - 1).bit_length()) if m > 1 else 1


def choose(device_name: str, dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> Schedule:
    """The schedule for [m, k] x [k, n] on the GPU of that name (`torch.cuda.get_device_name`).

    tma_ok: the operands qualify for the form "tma"; without it a pointer schedule is returned. Runs at every call of
    a product: after the first for a bucket it is a dictionary lookup.
    """
    schedule = _choose(device_name, dtype, bucket(m), n, k, tma_ok)
    return REFERENCE if excluded and schedule in excluded else schedule


@cache
def _choose(device_name: str, dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> Schedule:
    if dtype != torch.float32:
        rows = _tuned(device_name)
        row = rows.get((n, k)) or (rows[_nearest(rows, n, k)] if rows else {})
        schedule = row.get(m) or row.get(max((tuned for tuned in row if tuned < m), default=0))
        if schedule and (tma_ok or schedule.form == POINTER):
            return schedule
    return heuristic(dtype, m, n, k, tma_ok)


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@cache
def _tuned(device_name: str) -> dict[tuple[int, int], dict[int, Schedule]]:
    """(N, K) -> bucket of M -> schedule. float16 takes bfloat16's rows: equal bytes, equal instructions."""
    rows = _table().get(device_name, {}).get("bfloat16", {})
    shapes = {tuple(map(int, key.split(","))): row for key, row in rows.items()}
    return {(n, k): {int(m): Schedule.parse(text) for m, text in row.items()} for (n, k), row in shapes.items()}


def _nearest(rows: dict[tuple[int, int], Any], n: int, k: int) -> tuple[int, int]:
    """The tuned shape whose N and K differ least as ratios; N, which sets the number of tiles, counts twice."""
    return min(rows, key=lambda shape: 2 * abs(math.log2(shape[0] / n)) + abs(math.log2(shape[1] / max(k, 1))))


# -- without a table --------------------------------------------------------------------------------------------------


def heuristic(dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> Schedule:
    """A sound schedule for any GPU from sm_80 on (pointer forms fit 96 KiB of shared memory) and any shape."""
    if dtype == torch.float32:  # FMA units: bound by registers and shared memory
        if m <= 16:
            return Schedule(POINTER, 16, 32, 64, num_warps=4, num_stages=3)
        if m * n >= 128 * 128 * 64:  # 8 x 8 outputs a thread
            return Schedule(POINTER, 128, 128, 16, num_warps=8, num_stages=3)
        return Schedule(POINTER, 64, 64, 16, num_warps=4, num_stages=3)
    if tma_ok and m >= 256 and m * n >= 128 * 256 * 96:  # enough large tiles for most of the SMs
        return Schedule(TMA, 128, 256, 64, num_warps=8, num_stages=3, persistent=True)
    if tma_ok and m >= 128 and m * n >= 128 * 128 * 64:
        return Schedule(TMA, 128, 128, 64, num_warps=8, num_stages=4)
    if m <= 32:
        rows = 16 if m <= 16 else 32
        if n <= 4096:  # narrow tiles, or most SMs idle
            return Schedule(POINTER, rows, 16 if n <= 2048 else 32, 128, num_warps=4, num_stages=4)
        return Schedule(POINTER, rows, 64, 128, num_warps=4, num_stages=3, swap=True)
    if m <= 128 or m * n <= 128 * 128 * 64:
        return Schedule(POINTER, 64, 32 if n <= 4096 and m <= 128 else 64, 64, num_warps=4, num_stages=4)
    return Schedule(POINTER, 128, 128, 32, num_warps=4, num_stages=4)


# -- what the tuner tries ---------------------------------------------------------------------------------------------


def candidates(dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> list[Schedule]:
    """Every schedule worth a try for a shape, without repeats: what the tuner times and `verify` proves equal."""
    if dtype == torch.float32:
        found = _float32_candidates(m)
    elif m <= 16:
        eight = ((64, 256), (128, 128)) if m <= 8 else ()  # half the x of a 16-row tile, but no wgmma
        found = _few_rows(16, n) + [Schedule(POINTER, 8, *tile, num_warps=4, num_stages=5, swap=True) for tile in eight]
    elif m <= 64:
        found = _few_rows(bucket(m), n)
    elif m <= 128:
        found = _some_rows(n)
    else:
        found = _many_rows(m, n)
    found = [heuristic(dtype, bucket(m), n, k, tma_ok), *found]
    return [s for s in dict.fromkeys(found) if tma_ok or s.form == POINTER]


def _float32_candidates(m: int) -> list[Schedule]:
    if m <= 16:
        return [Schedule(POINTER, 16, n, k, 4, 3) for n, k in ((16, 64), (32, 64), (32, 128), (64, 32))]
    tiles = ((64, 64, 16, 4), (64, 64, 32, 8), (128, 64, 16, 8), (128, 128, 16, 8))
    return [Schedule(POINTER, *tile, num_stages=stages) for tile in tiles for stages in (2, 3)]


def _few_rows(rows: int, n: int) -> list[Schedule]:
    """Up to 64: bound by the memory that holds the weights. Enough programs, and enough bytes in flight in each.

    16 and 32 rows take the same tiles; with 64 a stage of long K no longer fits.
    """
    k = 256 if rows <= 32 else 128
    narrow = [
        Schedule(POINTER, rows, 16, 256, 4, 6 if rows <= 32 else 3),
        Schedule(POINTER, rows, 32, k, 4, 4),
        Schedule(POINTER, rows, 32, 128, 4, 5),
        Schedule(POINTER, rows, 64, 128, 4, 5, swap=True),
    ]
    narrowest = [Schedule(POINTER, rows // 2, 16, 256, 4, 5), Schedule(POINTER, rows // 2, 32, 128, 4, 5)]
    if rows == 16:
        narrowest = [Schedule(POINTER, 16, 8, 512, 4, 5), Schedule(POINTER, 16, 16, 512, 4, 5)]
        narrowest += [Schedule(POINTER, 16, 16, 256, 2, 6), Schedule(POINTER, 16, 8, 256, 2, 6)]
    middle = [Schedule(TMA, rows, 64, k, 4, 4, swap=True), Schedule(TMA, rows, 64, 128, 4, 5, swap=True)]
    if rows == 64:
        middle += [Schedule(POINTER, 64, 64, 128, 4, 4), Schedule(TMA, 64, 64, 128, 4, 4)]
    wide = [
        Schedule(POINTER, rows, 64, k, 4, 4, swap=True),
        Schedule(POINTER, rows, 128, 128, 4, 4, swap=True),
        Schedule(POINTER, rows, 128, 64, 4, 5, swap=True),
        Schedule(TMA, rows, 128, 128, 4, 4, swap=True),
        Schedule(TMA, rows, 128, 64, 4, 5, swap=True),
    ]
    widest = [
        Schedule(TMA, rows, 128, 128, 4, 4, swap=True, persistent=True),
        Schedule(TMA, rows, 256, 64, 8, 4, swap=True),
        Schedule(TMA, rows, 128, 128, 8, 5 if rows <= 32 else 4, swap=True),
    ]
    if n <= 2560:
        return narrow + narrowest + middle + wide[:1]
    return narrow + middle + wide + (widest if n > 4096 else narrowest[:2])


def _some_rows(n: int) -> list[Schedule]:
    """128 rows: between the two limits."""
    small = [
        Schedule(POINTER, 64, 32, 128, 4, 5),
        Schedule(POINTER, 64, 16, 256, 4, 3),
        Schedule(POINTER, 64, 64, 128, 4, 4),
        Schedule(POINTER, 64, 64, 128, 4, 5, swap=True),
        Schedule(POINTER, 128, 32, 128, 4, 4),
        Schedule(TMA, 64, 64, 128, 4, 5),
        Schedule(TMA, 128, 32, 128, 4, 4),
        Schedule(TMA, 64, 32, 128, 4, 5),
    ]
    medium = [
        Schedule(TMA, 64, 128, 128, 4, 4),
        Schedule(TMA, 128, 64, 128, 4, 4),
        Schedule(TMA, 128, 64, 64, 4, 4),
        Schedule(TMA, 128, 128, 64, 4, 4, swap=True),
        Schedule(TMA, 128, 128, 64, 8, 5),
    ]
    large = [
        Schedule(TMA, 128, 128, 128, 8, 3),
        Schedule(TMA, 128, 128, 64, 4, 3),
        Schedule(TMA, 128, 128, 64, 8, 3),
        Schedule(TMA, 128, 128, 64, 8, 4, persistent=True),
        Schedule(TMA, 128, 256, 64, 8, 3),
        Schedule(TMA, 128, 256, 64, 8, 3, persistent=True),
        Schedule(TMA, 64, 256, 64, 4, 4),
        Schedule(TMA, 128, 256, 64, 8, 4, swap=True, subtiles=2),
    ]
    return small + medium if n <= 4096 else small[3:4] + small[5:6] + medium + large


def _many_rows(m: int, n: int) -> list[Schedule]:
    """From 256 rows on: bound by the tensor cores once there is a tile for every SM."""
    small = [
        Schedule(POINTER, 64, 64, 128, 4, 5, swap=True),
        Schedule(TMA, 64, 32, 128, 4, 5),
        Schedule(TMA, 64, 64, 128, 4, 5),
        Schedule(TMA, 128, 64, 128, 4, 4),
        Schedule(TMA, 64, 128, 128, 4, 4),
        Schedule(TMA, 64, 128, 64, 4, 4),
    ]
    medium = [
        Schedule(TMA, 128, 128, 64, 4, 3),
        Schedule(TMA, 128, 128, 64, 8, 3),
        Schedule(TMA, 128, 128, 64, 8, 4, persistent=True),
        Schedule(TMA, 128, 128, 128, 8, 3, persistent=True, subtiles=2),
        Schedule(TMA, 128, 256, 64, 8, 3),
    ]
    wide = Schedule(TMA, 128, 256, 64, 8, 3, persistent=True)
    large = [
        wide,
        replace(wide, num_stages=4, subtiles=2),
        replace(wide, block_m=256, block_n=128),
        replace(wide, block_m=256, block_n=128, num_stages=4, subtiles=2),
        Schedule(TMA, 64, 256, 64, 4, 4, persistent=True),
        Schedule(TMA, 128, 256, 64, 8, 4),
    ]
    groups = [replace(wide, group_m=g) for g in (4, 16)] + [replace(wide, group_m=16, num_stages=4, subtiles=2)]
    tiles = -(-m // 128) * -(-n // 128)
    if tiles <= 64:
        return small + medium
    if tiles <= 528:
        return small[2:5] + medium + large
    return medium + large + groups
