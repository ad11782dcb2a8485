"""The inputs of a captured decode step: buffers of fixed addresses, and how they are filled from step to step.

    n sequences with one new token each, N >= n rows of a captured step, P pages of a sequence at most.

Rows past the batch are padding: token 0 at position 0 of a sequence without KV (length 0, slot -1), so they read no
page, write none, and no row sees another. A step may be launched while the last one is computed, so there are two sets
of buffers on the host, used by turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.schedule.scheduler import Chunk
from evalengine.kernels.attention_batch import SharedBlocks
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import GREEDY
from evalengine.layers.shared_blocks import CHUNK, SharedPages


class PageChange(NamedTuple):
    """New pages of one row of the block tables, from column `start` on."""

    row: int
    start: int
    pages: list[list[int]]  # of each table


@dataclass(frozen=True)
class Decodes:
    """A step in which every sequence computes one token: everything that a rank needs to compute it."""

    ids: np.ndarray  # int64 [n]: token ids, or references below 0 to what the last step chose (`LastTokens`)
    positions: np.ndarray  # int64 [n]
    changes: list[PageChange]  # pages that are new since the last such step
    shared: SharedPages | None  # what attention reads once, if that is new since the last step that said so
    rope_starts: np.ndarray | int = 0  # int64 [n]: `Sequence.rope_start`; 0 where no sequence has another
    slots: np.ndarray | None = None  # int32 [n]: places in the pools of states, where layers are recurrent


class KnownPages:
    """The pages last sent to every row of the block tables; on rank 0, which has the sequences."""

    def __init__(self, rows: int, has_rope_starts: bool = False, *, states: bool = False) -> None:
        """states: whether layers are recurrent."""
        self._rows, self._has_rope_starts, self._states = rows, has_rope_starts, states
        self.forget()

    def forget(self) -> None:
        """Has the next step tell all rows' pages anew: it is not known whether a failed step's changes were written."""
        self._known: list[tuple[list[list[int]], int]] = [([], 0)] * self._rows  # a row's page lists and their length
        self._shared: SharedPages | None = None

    def decodes(self, chunks: Sequence[Chunk], shared: SharedPages | None = None) -> Decodes:
        """The step of these chunks, with the pages that are new since the last one. shared: for a step that reads
        what its decodes share once."""
        n = len(chunks)
        ids = np.fromiter((_token_id(c) for c in chunks), dtype=np.int64, count=n)
        positions = np.fromiter((c.start for c in chunks), dtype=np.int64, count=n)
        is_new = shared is not None and shared is not self._shared
        self._shared = shared or self._shared
        starts = np.fromiter((c.seq.rope_start for c in chunks), np.int64, n) if self._has_rope_starts else 0
        slots = np.array([c.seq.state_slot for c in chunks], dtype=np.int32) if self._states else None
        return Decodes(ids, positions, self._changes(chunks), shared if is_new else None, starts, slots)

    def _changes(self, chunks: Sequence[Chunk]) -> list[PageChange]:
        """The rows whose pages have changed. A sequence's page lists only grow (pages that it has given back stay in
        them); another sequence has other lists."""
        changes = []
        for row, chunk in enumerate(chunks):
            tables = chunk.seq.block_tables
            before, count = self._known[row]
            if before is not tables or count != len(tables[0]):
                start = count if before is tables else 0
                self._known[row] = tables, len(tables[0])
                changes.append(PageChange(row, start, [pages[start:] for pages in tables]))
        return changes


class Stage:
    """Pinned memory on the host for one step's inputs and results."""

    def __init__(self, rows: int, tables: int, pages: int, chunks: int | None, pinned: bool) -> None:
        self.units = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for shape in _unit_shapes(rows, chunks)]
        self.scalars = torch.zeros(rows * row_bytes(tables), dtype=torch.uint8, pin_memory=pinned)
        self.ids, self.positions, self.slots, self.lengths = (part.numpy() for part in _parts(self.scalars, rows))
        self.pinned_table = torch.zeros(rows, tables, pages, dtype=torch.int32, pin_memory=pinned)
        self.table = self.pinned_table.numpy()
        self.missed: list[PageChange] = []  # changes of the steps since this stage was last used
        self.state_slots = torch.zeros(rows, dtype=torch.int32, pin_memory=pinned)
        self.greedy_ids = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self.logprobs = torch.zeros(rows, dtype=torch.float32, pin_memory=pinned)
        self.event: Any = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Waits until the device has read and written everything in this stage."""
        if self.event is not None:
            self.event.synchronize()

    def write_pages(self) -> None:
        """Brings the host's block tables up to date."""
        for row, start, pages in self.missed:
            self.table[row, :, start : start + len(pages[0])] = pages
        self.missed.clear()

    def fetch(self, greedy_ids: Tensor, logprobs: Tensor) -> None:
        """Copies the step's results, [n] each, to the host once the device has computed them."""
        self.greedy_ids[: len(greedy_ids)].copy_(greedy_ids, non_blocking=True)
        self.logprobs[: len(logprobs)].copy_(logprobs, non_blocking=True)
        if self.event is not None:
            # Without an argument, the event would be recorded on the current device's stream.
            self.event.record(torch.cuda.current_stream(greedy_ids.device))


class DecodeInputs:
    """The buffers on the device that every graph reads. One or two transfers a step fill them.

    The block tables persist from step to step: only the rows that have changed are written.
    """

    def __init__(
        self,
        rows: int,
        pages: int,
        block_size: int,
        device: torch.device,
        table_of: Sequence[int] = (0,),
        chunks: int | None = None,
    ) -> None:
        """table_of: each layer's block table. chunks: those of a sequence at most, for steps that read what decodes
        share once; None: there are no such steps."""
        self._block_size, self._table_of = block_size, table_of
        tables = max(table_of) + 1
        self._stages = [Stage(rows, tables, pages, chunks, device.type == "cuda") for _ in range(2)]
        self._units = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in _unit_shapes(rows, chunks)]
        self._scalars = torch.zeros(rows * row_bytes(tables), dtype=torch.uint8, device=device)
        self.ids, self.positions, self.slots, self.lengths = _parts(self._scalars, rows)
        self.slots.fill_(-1)  # before the first step all rows are padding
        self.table = torch.zeros(rows, tables, pages, dtype=torch.int32, device=device)
        self.state_slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.wanted = torch.full((rows,), GREEDY, dtype=torch.int64, device=device)

    def fill(self, decodes: Decodes) -> Stage:
        """Sends the step's inputs to the device; all other rows become padding: a graph of more rows than the step's
        may be captured over them. Returns the stage in use."""
        self._stages.reverse()
        stage, n, positions = self._stages[0], len(decodes.ids), decodes.positions
        for buffers in self._stages:
            buffers.missed += decodes.changes
        stage.wait()
        stage.write_pages()
        pages = stage.table[np.arange(n), :, positions // self._block_size].astype(np.int64).T  # [tables, n]
        stage.ids[:n] = decodes.ids
        stage.positions[:n] = positions + decodes.rope_starts
        stage.slots[:, :n] = pages * self._block_size + positions % self._block_size
        stage.lengths[:n] = positions + 1
        for values, padding in ((stage.ids, 0), (stage.positions, 0), (stage.slots, -1), (stage.lengths, 0)):
            values[..., n:] = padding
        self._scalars.copy_(stage.scalars, non_blocking=True)
        if decodes.slots is not None:
            stage.state_slots[:n] = torch.from_numpy(decodes.slots)
            stage.state_slots[n:] = -1
            self.state_slots.copy_(stage.state_slots, non_blocking=True)
        if changed := [change.row for change in decodes.changes]:
            part = slice(min(changed), max(changed) + 1)
            self.table[part].copy_(stage.pinned_table[part], non_blocking=True)
        if decodes.shared is not None:
            self._write_units(decodes.shared, stage)
        return stage

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Make every row padding, and restore the step's inputs on exit: a step that runs within reads and writes no
        page and no state."""
        buffers = self._scalars, self.state_slots, *self._units
        before = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            buffer.zero_()
        self.slots.fill_(-1)
        self.state_slots.fill_(-1)
        try:
            yield
        finally:
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)

    def _write_units(self, shared: SharedPages, stage: Stage) -> None:
        """Sends what the decodes share. Rows past them hold lengths of 0, and read nothing."""
        for values, pinned, buffer in zip(shared.arrays, stage.units, self._units, strict=True):
            part = tuple(slice(n) for n in values.shape)
            pinned[part].numpy()[:] = values
            whole_rows = slice(len(values))
            buffer[whole_rows].copy_(pinned[whole_rows], non_blocking=True)

    def metadata(self, size: int, kv_len: int, cascade: bool = False) -> AttentionMetadata:
        """The metadata of `size` decodes of up to `kv_len` tokens. The kernels' grids are laid out for that length, and
        each sequence's own length is read from the buffer, and so is what they share with `cascade`."""
        shared = None
        if cascade:
            tiles, members, count, tokens = self._units
            most_tiles = _most_tiles(size, -(-kv_len // CHUNK))
            shared = SharedBlocks(tiles, members, count, tokens[:size], most_tiles)
        tables = [
            AttentionMetadata(
                slot_mapping=slots[:size],
                cu_seqlens_q=self.starts[: size + 1],
                seqlens_k=self.lengths[:size],
                block_table=table[:size, : -(-kv_len // self._block_size)],
                query_lens=[1] * size,
                kv_lens=[kv_len] * size,
                shared=shared,
                state_slots=self.state_slots[:size],
            )
            for slots, table in zip(self.slots, self.table.unbind(1), strict=True)
        ]
        return AttentionMetadata.of_layers(tables, self._table_of)


def _most_tiles(rows: int, chunks: int) -> int:
    """Every tile has two decodes or more, but for a last one of a unit, which follows a full one."""
    return max(1, rows // 2 * chunks)


def _unit_shapes(rows: int, chunks: int | None) -> list[tuple[int, ...]]:
    """The shapes of `SharedBlocks`' tensors, for as much as so many decodes can share; none for no chunks."""
    if chunks is None:
        return []
    return [(_most_tiles(rows, chunks), 4), (rows * chunks,), (1,), (rows, chunks)]


def _token_id(decode: Chunk) -> int:
    """The token id at the chunk's position, or a reference below 0 to the token that the last step is computing."""
    seq = decode.seq
    return seq.token_ids[decode.start] if decode.start < seq.num_tokens else -1 - seq.device_row


def _parts(buffer: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of a byte buffer: int64 [rows] twice, int64 [tables, rows] and int32 [rows], one after another."""
    words = buffer[: -4 * rows]
    integers = words.view(torch.int64).view(-1, rows)
    return integers[0], integers[1], integers[2:], buffer[len(words) :].view(torch.int32)


def row_bytes(tables: int) -> int:
    """Bytes of a row: a sequence's token id, position and slot in each block table (int64), and its length (int32)."""
    return 8 * (2 + tables) + 4
