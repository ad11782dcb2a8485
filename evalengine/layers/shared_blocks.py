"""Which decodes of a step have the same pages, so that attention may read them once for all (`attention_decode`).

    S decodes, P pages a sequence at most, C chunks.

Only page ids are compared: a page has one content for all readers, so whatever is grouped here changes
no bit, only the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalengine.kernels.attention_batch import TILE_DECODES

CHUNK, BLOCK = 1024, 64  # tokens: the contract's (`kernels.attention`, which needs Triton)
# Below so many bytes of one layer's K and V that need not be read again, the second launch costs more than it saves.
# On an H200, whose L2 cache holds a prefix of 1,024 tokens, 64 sequences (252 MiB) took 1.03 of the time, and 256
# (1,020 MiB) 0.60.
WORTHWHILE = 512 << 20


@dataclass(frozen=True)
class SharedPages:
    """`SharedBlocks` on the host; all arrays are int32."""

    tiles: np.ndarray  # [tiles, 4]
    members: np.ndarray  # [places in all tiles]
    tokens: np.ndarray  # [S, C]
    saved: int  # tokens that are not read again

    @property
    def arrays(self) -> list[np.ndarray]:
        """The tensors of `SharedBlocks` on the device, in its order."""
        return [self.tiles, self.members, np.array([len(self.tiles)], dtype=np.int32), self.tokens]


def serves(page: int) -> bool:
    """Whether pages of so many tokens can be shared: no page may span two chunks."""
    return CHUNK % page == 0


def find(table: np.ndarray, lengths: np.ndarray, page: int) -> SharedPages | None:
    """The blocks that decodes with these pages (int32 [S, P]) and tokens (int [S]) share; None if there are none.

    Each chunk is considered separately. Its decodes are cut into units at the depth (a number of pages) that saves the
    most; each unit then shares all that its own decodes have in common. Only blocks that lie wholly before a decode's
    end count.
    """
    assert serves(page)
    step, depth = max(1, BLOCK // page), CHUNK // page
    tokens = np.zeros((len(table), max(1, -(-int(lengths.max(initial=1)) // CHUNK))), dtype=np.int32)
    tiles: list[tuple[int, int, int, int]] = []
    members: list[np.ndarray] = []
    place = saved = 0
    for chunk in range(tokens.shape[1]):
        ids = table[:, chunk * depth : (chunk + 1) * depth]
        whole = np.clip((lengths - chunk * CHUNK) // max(page, BLOCK), 0, None) * step
        for rows, common in _units(ids, np.minimum(whole, ids.shape[1]), step):
            shared = common * page
            tokens[rows, chunk] = shared
            saved += shared * (len(rows) - 1)
            for first in range(0, len(rows), TILE_DECODES):
                tile = rows[first : first + TILE_DECODES]
                tiles.append((chunk, shared, place, len(tile)))
                members.append(tile)
                place += len(tile)
    if not tiles:
        return None
    return SharedPages(np.array(tiles, dtype=np.int32), np.concatenate(members).astype(np.int32), tokens, saved)


def _units(ids: np.ndarray, whole: np.ndarray, step: int) -> list[tuple[np.ndarray, int]]:
    """The decodes that share a chunk's first pages, and how many: a multiple of `step`.

    ids: [S, pages of the chunk]; whole: how many of them each decode may share.
    """
    rows = np.flatnonzero(whole >= step)
    ids, whole = ids[rows], whole[rows]
    steps = int(whole.max(initial=0)) // step
    if len(rows) < 2 or not steps:
        return []
    # A page that may not be shared, and the first one that differs hides those behind it, counts as a separate page.
    ends = ids[:, step - 1 :: step][:, :steps].astype(np.int64)
    ends = np.where(np.arange(1, steps + 1) * step <= whole[:, None], ends, -1 - np.arange(len(rows))[:, None])
    ordered = np.sort(ends, axis=0)
    repeated = (ordered[1:] == ordered[:-1]).sum(axis=0)  # decodes that would not read these blocks again
    best = int(np.argmax(repeated * np.arange(1, steps + 1)))
    if not repeated[best]:
        return []
    _, first, unit, sizes = np.unique(ends[:, best], return_index=True, return_inverse=True, return_counts=True)
    same = np.logical_and.accumulate(ids == ids[first[unit]], axis=1).sum(axis=1)
    common = np.minimum(same, whole)
    units = []
    for number in np.flatnonzero(sizes > 1):
        inside = np.flatnonzero((unit == number) & (common >= step))
        if len(inside) > 1:
            units.append((rows[inside], int(common[inside].min()) // step * step))
    return units
