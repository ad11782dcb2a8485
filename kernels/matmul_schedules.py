"""Which tiles a matrix product is cut into. No choice here changes a bit of the result (kernels/matmul.py); it only
changes the time, so it may depend on anything.

A row of `matmul_table.json` (made by `python -m benchmarks matmul --tune`) is for a GPU and a shape [N, K] and
holds schedules by bucket of M. `choose` takes, in this order:

* the row's schedule for the bucket, below MANY_ROWS rows;
* cuBLASLt without a split of K (kernels/cublaslt.py), where the operands suit it and there are at least CUBLASLT_ROWS
  rows: the tuner leaves out buckets in which cuBLASLt is the quickest, and other shapes and GPUs are not tuned at all.
  On an H200 a tile for 256 rows took 125 us for 160 rows of Qwen3-8B's gate and up projection, cuBLASLt 58. From
  MANY_ROWS on it precedes the row too: a tile that is as quick alone, timed for milliseconds, is slower in a run, in
  which the GPU is hot for seconds (Qwen3-8B on an H200: mmlu 1.93 s with the tiles, 1.81 without);
* the row's schedule for the next larger bucket, or the nearest one if that is more than twice as large; a row of the
  nearest shape tuned on that GPU; or `heuristic`.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch

TABLE = Path(__file__).with_name("matmul_table.json")
# Values of M: a bucket's schedule serves every M above the bucket before. The buckets between powers of two are batch
# sizes of CUDA graphs.
BUCKETS = (
    *(1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(384, 512, 768, 1024, 1536, 2048, 4096, 8192),
)
MAX_BUCKET = BUCKETS[-1]
# The numbers of rows for which cuBLASLt chooses its algorithm: a tile that fills the last wave of programs for 4,096
# rows may leave half of it empty for 2,400 (results/reference/PROFILE.md).
CUBLASLT_BUCKETS = (*(m for m in BUCKETS if m <= 256), *range(320, 1024, 64), *range(1024, MAX_BUCKET + 1, 128))
CUBLASLT_ROWS = 32  # With fewer rows, cuBLASLt without a split of K needs up to twice as long as a narrow tile.
# From here on cuBLASLt is tried before a tuned tile, which takes its place where cuBLASLt cannot serve.
MANY_ROWS = 1024
Form = Literal["pointer", "tma", "cublaslt"]
POINTER: Form = "pointer"
TMA: Form = "tma"
CUBLASLT: Form = "cublaslt"


@dataclass(frozen=True)
class MatmulSchedule:
    """How the output [M, N] is cut into tiles and how a tile is computed.

    form: "pointer" (any strides, batches), "tma" (tensor descriptors: both operands K-contiguous, rows 16-byte aligned;
    Hopper or newer) or "cublaslt", which has no tile: block_m is the number of rows for which cuBLASLt chooses its
    algorithm, the rest means nothing.

    block_m, block_n: rows and columns of a tile, powers of two (block_n of "tma" without swap also the sum of two, each
    at least 16); block_k: K of one pipeline step. swap: the weights are the MMA's 64-row side, for few rows. persistent
    (tma): one program per SM walks over tiles. group_m: tiles of that many row blocks are taken column by column, so
    that both operands are still in L2. subtiles (tma): the tile is stored in that many parts, which frees shared memory
    for more stages.
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

    @property
    def columns(self) -> tuple[int, int]:
        """block_n as the powers of two that add up to it: (160) -> (128, 32), (128) -> (128, 0)."""
        largest = 1 << (self.block_n.bit_length() - 1)
        return largest, self.block_n - largest

    def masks_rows(self, m: int) -> bool:
        """Whether a tile's rows past the m-th are masked (where they are half or more): another compiled kernel."""
        return self.form == POINTER and 2 * m <= self.block_m

    def loops(self, m: int, n: int, programs: int) -> bool:
        """Whether one of so many persistent programs has a second tile of [m, n]."""
        return self.persistent and -(-m // self.block_m) * -(-n // self.block_n) > programs

    def __str__(self) -> str:
        """Compact and readable, the table's form: "tma 128x256x64 w8 s3 g8 persistent", "cublaslt m160"."""
        if self.form == CUBLASLT:
            return f"{CUBLASLT} m{self.block_m}"
        flags = (
            " swap" * self.swap + " persistent" * self.persistent + f" subtiles{self.subtiles}" * (self.subtiles > 1)
        )
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.form} {tile} w{self.num_warps} s{self.num_stages} g{self.group_m}{flags}"

    @classmethod
    def parse(cls, text: str) -> MatmulSchedule:
        """The inverse of str(); raises ValueError for anything else."""
        if match := re.fullmatch(rf"{CUBLASLT} m(\d+)", text):
            return by_cublaslt(int(match[1]))
        tile = r"(pointer|tma) (\d+)x(\d+)x(\d+)"
        pattern = tile + r" w(\d+) s(\d+) g(\d+)( swap)?( persistent)?(?: subtiles(\d+))?"
        if not (match := re.fullmatch(pattern, text)):
            raise ValueError(f"not a matmul schedule: {text!r}")
        form, *sizes, swap, persistent, subtiles = match.groups()
        block_m, block_n, block_k, warps, stages, group = map(int, sizes)
        return cls(
            cast(Form, form), block_m, block_n, block_k, warps, stages,
            bool(swap), bool(persistent), group, int(subtiles or 1),
        )  # fmt: skip


REFERENCE = MatmulSchedule(POINTER, 64, 64, 32, num_warps=4, num_stages=2)


def by_cublaslt(rows: int) -> MatmulSchedule:
    """The cuBLASLt schedule with the algorithm for so many rows."""
    return MatmulSchedule(CUBLASLT, rows, 1, 1, num_warps=0, num_stages=0, group_m=0)


# Schedules that evalengine/verification found wrong on this GPU; this process never chooses them.
excluded: set[MatmulSchedule] = set()


def bucket(m: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest of the buckets that is at least m, or the largest one."""
    return buckets[min(bisect_left(buckets, m), len(buckets) - 1)]


def choose(
    device_name: str, dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool, cublaslt_ok: bool = False
) -> MatmulSchedule:
    """The schedule for [m, k] x [k, n] on the GPU of that name (`torch.cuda.get_device_name`).

    tma_ok, cublaslt_ok: the operands qualify for these forms; without either a pointer schedule is returned. A
    schedule that differed on this GPU is not chosen: a tile takes cuBLASLt's place, `REFERENCE` the tile's.
    """
    for schedule in preferred(device_name, dtype, bucket(m, CUBLASLT_BUCKETS), n, k, tma_ok, cublaslt_ok):
        if not excluded or schedule not in excluded:
            return schedule
    return REFERENCE


@cache
def preferred(
    device_name: str, dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool, cublaslt_ok: bool
) -> tuple[MatmulSchedule, ...]:
    """The schedules that `choose` tries for m, one of CUBLASLT_BUCKETS, the first choice first."""
    tile = _choose(device_name, dtype, bucket(m), n, k, tma_ok)
    tuned = m < MANY_ROWS and bucket(m) in _tuned(device_name).get((n, k), ())
    if tuned or not cublaslt_ok or m < CUBLASLT_ROWS or dtype == torch.float32:
        return (tile,)
    return by_cublaslt(m), tile


def is_tuned(device_name: str) -> bool:
    """Whether schedules were measured on the GPU of that name."""
    return bool(_tuned(device_name))


@cache
def _choose(device_name: str, dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> MatmulSchedule:
    if dtype != torch.float32:
        rows = _tuned(device_name)
        row = rows.get((n, k)) or (rows[_nearest(rows, n, k)] if rows else {})
        # The next larger bucket if it is at most twice as large, else the nearest by ratio. Without this limit, a row
        # that leaves buckets to cuBLASLt would give 128 rows the tile for 1,024.
        larger = [tuned for tuned in row if m <= tuned <= 2 * m]
        nearest = min(larger) if larger else min(row, key=lambda tuned: (max(tuned / m, m / tuned), -tuned), default=0)
        schedule = row.get(nearest)
        if schedule and (tma_ok or schedule.form == POINTER):
            return schedule
    return heuristic(dtype, m, n, k, tma_ok)


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@cache
def _tuned(device_name: str) -> dict[tuple[int, int], dict[int, MatmulSchedule]]:
    """(N, K) -> bucket of M -> schedule. float16 takes bfloat16's rows: equal bytes, equal instructions."""
    rows = _table().get(device_name, {}).get("bfloat16", {})
    shapes = {tuple(map(int, key.split(","))): row for key, row in rows.items()}
    return {(n, k): {int(m): MatmulSchedule.parse(text) for m, text in row.items()} for (n, k), row in shapes.items()}


def _nearest(rows: dict[tuple[int, int], Any], n: int, k: int) -> tuple[int, int]:
    """The tuned shape whose N and K differ least as ratios; N, which sets the number of tiles, counts twice."""
    return min(rows, key=lambda shape: 2 * abs(math.log2(shape[0] / n)) + abs(math.log2(shape[1] / max(k, 1))))


# -- without a table --------------------------------------------------------------------------------------------------


def heuristic(dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> MatmulSchedule:
    """A sound schedule for any GPU from sm_80 on (pointer forms fit 96 KiB of shared memory) and any shape."""
    if dtype == torch.float32:  # FMA units: bound by registers and shared memory
        if m <= 16:
            return MatmulSchedule(POINTER, 16, 32, 64, num_warps=4, num_stages=3)
        if m * n >= 128 * 128 * 64:  # 8 x 8 outputs a thread
            return MatmulSchedule(POINTER, 128, 128, 16, num_warps=8, num_stages=3)
        return MatmulSchedule(POINTER, 64, 64, 16, num_warps=4, num_stages=3)
    if tma_ok and m >= 256 and m * n >= 128 * 256 * 96:  # enough large tiles for most of the SMs
        return MatmulSchedule(TMA, 128, 256, 64, num_warps=8, num_stages=3, persistent=True)
    if tma_ok and m >= 128 and m * n >= 128 * 128 * 64:
        return MatmulSchedule(TMA, 128, 128, 64, num_warps=8, num_stages=4)
    if m <= 32:
        rows = 16 if m <= 16 else 32
        if n <= 4096:  # wider tiles would leave most SMs idle
            return MatmulSchedule(POINTER, rows, 16 if n <= 2048 else 32, 128, num_warps=4, num_stages=4)
        return MatmulSchedule(POINTER, rows, 64, 128, num_warps=4, num_stages=3, swap=True)
    if m <= 128 or m * n <= 128 * 128 * 64:
        return MatmulSchedule(POINTER, 64, 32 if n <= 4096 and m <= 128 else 64, 64, num_warps=4, num_stages=4)
    return MatmulSchedule(POINTER, 128, 128, 32, num_warps=4, num_stages=4)
