"""The matmul schedules worth a try for a shape: the tuner times them, and tests prove them equal."""

from __future__ import annotations

from dataclasses import replace

import torch

from evalengine.kernels.matmul_schedules import POINTER, TMA, MatmulSchedule, bucket, heuristic

SMS = 132  # the SMs of an H200, which only guide the choice of candidates
# (most rows, most columns; 0: any) -> the quickest of 50 to 200 schedules for such shapes on an H200
_TRIED = {
    (16, 2560): """
        pointer 16x8x64 w4 s8 g8 | pointer 16x8x256 w2 s6 g8 | pointer 16x8x512 w4 s3 g8 | pointer 16x16x64 w4 s8 g8 |
        pointer 16x16x512 w4 s3 g8 | pointer 16x64x128 w4 s8 g8 swap | pointer 16x64x256 w4 s4 g8 swap |
        tma 16x64x128 w4 s8 g8 swap | tma 16x64x256 w4 s4 g8 swap | tma 16x64x256 w4 s5 g8 swap""",
    (16, 6144): """
        pointer 8x64x256 w4 s6 g8 swap | pointer 16x32x128 w4 s8 g8 | pointer 16x64x64 w4 s7 g8 swap |
        pointer 16x64x128 w4 s5 g8 swap | pointer 16x64x128 w4 s8 g8 swap | pointer 16x64x256 w4 s4 g8 swap |
        tma 16x64x128 w4 s8 g8 swap | tma 16x64x256 w4 s4 g8 swap | tma 16x64x256 w4 s5 g8 swap""",
    (16, 0): """
        pointer 8x64x128 w4 s3 g8 swap | pointer 8x64x256 w4 s3 g8 swap | pointer 16x64x64 w4 s7 g8 swap |
        pointer 16x64x128 w4 s3 g8 swap | pointer 16x128x64 w4 s3 g8 swap | pointer 16x128x64 w4 s6 g8 swap |
        pointer 16x256x128 w8 s3 g8 swap | tma 16x64x128 w4 s3 g8 swap | tma 16x128x128 w4 s4 g8 swap""",
    (32, 2560): """
        pointer 32x8x64 w4 s8 g8 | pointer 32x8x256 w2 s5 g8 | pointer 32x16x64 w4 s8 g8 |
        pointer 32x16x128 w4 s5 g8 | pointer 32x16x256 w4 s4 g8 | pointer 32x64x128 w4 s5 g8 swap |
        tma 32x64x128 w4 s8 g8 swap | tma 32x64x256 w4 s4 g8 swap""",
    (32, 6144): """
        pointer 32x32x256 w4 s4 g8 | pointer 32x64x64 w4 s8 g8 swap | pointer 32x64x128 w4 s5 g8 swap |
        pointer 32x64x256 w4 s4 g8 swap | tma 32x64x128 w4 s5 g8 swap | tma 32x64x128 w4 s8 g8 swap |
        tma 32x64x256 w4 s4 g8 swap""",
    (32, 0): """
        pointer 32x64x64 w4 s5 g8 swap | pointer 32x256x128 w8 s3 g8 swap | tma 32x64x64 w4 s5 g8 swap |
        tma 32x64x128 w4 s2 g8 swap | tma 32x64x128 w4 s4 g8 swap | tma 32x128x64 w4 s3 g8 swap |
        tma 32x128x128 w4 s4 g8 swap persistent | tma 32x256x128 w8 s3 g8 swap""",
    (64, 2560): """
        pointer 32x16x256 w4 s6 g8 | pointer 64x16x64 w4 s8 g8 | pointer 64x16x128 w4 s5 g8 |
        pointer 64x32x128 w4 s5 g8 | tma 16x64x256 w4 s5 g8 swap | tma 32x64x128 w4 s8 g8 swap |
        tma 64x32x128 w4 s4 g8 | tma 64x32x128 w4 s8 g8""",
    (64, 6144): """
        pointer 32x64x64 w4 s8 g8 swap | pointer 32x64x256 w4 s4 g8 swap | pointer 64x32x128 w4 s5 g8 |
        pointer 64x32x128 w4 s8 g8 | pointer 64x64x128 w4 s5 g8 swap | tma 32x64x128 w4 s8 g8 swap |
        tma 32x64x256 w4 s4 g8 swap | tma 64x64x128 w4 s5 g8 swap | tma 64x64x128 w4 s6 g8""",
    (64, 0): """
        pointer 64x64x128 w4 s4 g8 swap | pointer 64x128x64 w4 s4 g8 swap | tma 64x64x64 w4 s4 g8 swap |
        tma 64x64x128 w4 s3 g8 swap | tma 64x128x64 w4 s2 g8 swap | tma 64x128x64 w4 s4 g8 | tma 64x128x128 w4 s2 g8 |
        tma 64x128x128 w4 s4 g8 swap | tma 64x128x128 w4 s4 g8 swap persistent""",
    (128, 2560): """
        pointer 64x16x128 w4 s5 g8 | pointer 64x32x128 w4 s5 g8 | tma 32x64x128 w4 s4 g8 swap |
        tma 32x64x128 w4 s8 g8 swap | tma 32x64x256 w4 s4 g8 swap | tma 64x16x128 w4 s5 g8 | tma 64x16x256 w4 s5 g8 |
        tma 64x32x128 w4 s5 g8 | tma 64x64x128 w4 s6 g8 swap""",
    (128, 6144): """
        pointer 64x64x64 w4 s6 g8 swap | tma 32x64x128 w4 s4 g8 swap | tma 64x64x128 w4 s5 g8 |
        tma 64x64x128 w4 s6 g8 | tma 64x64x128 w4 s6 g8 swap | tma 64x128x64 w4 s8 g8 | tma 64x128x64 w4 s8 g8 swap |
        tma 128x64x64 w4 s8 g8""",
    (128, 0): """
        tma 64x256x64 w4 s5 g8 | tma 128x128x64 w4 s3 g8 swap | tma 128x128x64 w4 s5 g8 persistent |
        tma 128x128x64 w4 s6 g8 | tma 128x128x64 w4 s6 g8 swap""",
}
# The same for more than 128 rows, by the largest number of 128x128 tiles (0: any).
_TRIED_MANY_ROWS = {
    64: """
        pointer 64x64x128 w4 s5 g8 swap | tma 64x32x128 w4 s5 g8 | tma 64x64x64 w4 s6 g8 |
        tma 64x64x128 w4 s4 g8 swap | tma 64x64x128 w4 s6 g8 | tma 64x128x64 w4 s8 g8 | tma 64x128x128 w4 s4 g8 |
        tma 128x32x128 w4 s5 g8 | tma 128x64x64 w4 s8 g8""",
    528: """
        tma 64x64x64 w4 s4 g8 swap | tma 64x128x64 w4 s4 g8 | tma 64x128x128 w4 s4 g8 persistent |
        tma 64x256x64 w4 s4 g8 persistent | tma 64x256x64 w4 s5 g8 | tma 128x64x64 w4 s4 g8 |
        tma 128x128x64 w4 s3 g8 | tma 128x128x64 w4 s4 g8 swap | tma 128x128x64 w4 s6 g8 persistent |
        tma 128x128x64 w8 s4 g8 persistent | tma 128x256x64 w8 s4 g4 persistent subtiles2 |
        tma 128x256x64 w8 s4 g8 persistent subtiles2 | tma 256x128x64 w8 s4 g8 persistent subtiles2""",
    0: """
        tma 128x128x64 w4 s6 g8 persistent | tma 128x256x64 w8 s3 g8 persistent |
        tma 128x256x64 w8 s4 g4 persistent subtiles2 | tma 128x256x64 w8 s4 g8 persistent subtiles2 |
        tma 128x256x64 w8 s4 g16 persistent subtiles2""",
}


def candidates(dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> list[MatmulSchedule]:
    """Every schedule worth a try for a shape, without repeats; for an M between powers of two also the next one's."""
    power = 1 << (m - 1).bit_length()
    if power != m:
        return list(dict.fromkeys([*_candidates(dtype, m, n, k, tma_ok), *candidates(dtype, power, n, k, tma_ok)]))
    return _candidates(dtype, m, n, k, tma_ok)


def _candidates(dtype: torch.dtype, m: int, n: int, k: int, tma_ok: bool) -> list[MatmulSchedule]:
    if dtype == torch.float32:
        schedules = _float32_candidates(m)
    elif m <= 128:
        rows, columns = max(16, 1 << (m - 1).bit_length()), 2560 if n <= 2560 else 6144 if n <= 6144 else 0
        schedules = _parsed(_TRIED[rows, columns])
    else:
        tiles = -(-m // 128) * -(-n // 128)
        schedules = _parsed(_TRIED_MANY_ROWS[64 if tiles <= 64 else 528 if tiles <= 528 else 0])
    if dtype != torch.float32 and m >= 128:
        schedules += _sums_of_two(m, n)
    schedules = [heuristic(dtype, bucket(m), n, k, tma_ok), *schedules]
    return [s for s in dict.fromkeys(schedules) if tma_ok or s.form == POINTER]


def _parsed(lines: str) -> list[MatmulSchedule]:
    return [MatmulSchedule.parse(line.strip()) for line in lines.split("|")]


def _float32_candidates(m: int) -> list[MatmulSchedule]:
    if m <= 16:
        return [MatmulSchedule(POINTER, 16, n, k, 4, 3) for n, k in ((16, 64), (32, 64), (32, 128), (64, 32))]
    tiles = ((64, 64, 16, 4), (64, 64, 32, 8), (128, 64, 16, 8), (128, 128, 16, 8))
    return [MatmulSchedule(POINTER, *tile, num_stages=stages) for tile in tiles for stages in (2, 3)]


def _sums_of_two(m: int, n: int) -> list[MatmulSchedule]:
    """Tiles as wide as two powers of two, where they occupy nine tenths of the SMs' time, in at most four rounds.

    N = 2560 and M = 1024, say: 128 tiles of 128 x 160, but 160 of 128 x 128 or 80 of 128 x 256. The five of them that
    read the least for each output.
    """
    shapes = []
    for rows in (64, 128, 256):
        for columns in (48, 80, 96, 144, 160, 192, 288, 320) if rows <= 128 else (144, 160):
            tiles = -(-m // rows) * -(-n // columns)
            rounds = -(-tiles // SMS)
            if rounds <= 4 and m * n >= 0.9 * rounds * SMS * rows * columns:
                shapes.append((rows, columns, rounds > 1))
    shapes.sort(key=lambda tile: 1 / tile[0] + 1 / tile[1])
    return [_with_stages(*tile) for tile in shapes[:5]]


def _with_stages(rows: int, columns: int, several: bool) -> MatmulSchedule:
    """The tile with as many stages as fit, at most six; persistent where a program has several tiles.

    Four warps as long as their registers hold it: with eight, tiles of 128 rows won for no shape.
    """
    block_k, warps = 128 if rows * columns <= 64 * 96 else 64, 4 if rows * columns <= 128 * 192 else 8
    s = MatmulSchedule(TMA, rows, columns, block_k, warps, persistent=several)
    main, rest = s.columns
    subtiles = 4 if main >= 256 and rows >= 128 else 2  # 128 x 288: 29.7 us with four, 32.3 with two
    # Shared memory in addition to the stages: the tile that is stored while the next one is loaded, or (seen with
    # float32 outputs) stored separately.
    extra = rows * (main // subtiles + rest) * 2 if several else rows * rest * 4
    stages = min(6, ((220 << 10) - extra) // ((rows + columns) * block_k * 2))
    return replace(s, num_stages=stages, subtiles=subtiles)
