"""The collectives of a tensor-parallel model, and the token ids that each rank holds.

    T tokens, n columns of one rank, V vocabulary.

A batch-invariant level only ever gathers: every output column is computed by one rank with its whole chain of products,
so no floating-point sum crosses ranks and every degree gives the bits of one rank (NUMERICS.md). `fast` sums as usual.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels.torch_private import gather_bytes

if TYPE_CHECKING:
    from evalengine.layers.peer_memory import PeerMemory  # needs Triton

logger = logging.getLogger(__name__)
SECONDS_TO_ABORT = 2.0  # gloo aborts at once; NCCL needs a minute after a rank was lost


class TensorParallel:
    """One rank's place among `size`, and its collectives. Every rank calls them in the same order.

    group: a process group of torch.distributed (its backend object, `ProcessGroupGloo` or `ProcessGroupNCCL`); None
    for a single rank, for which every collective is the identity.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        assert 0 <= rank < size and (size == 1 or group is not None)
        self.rank, self.size, self._group = rank, size, group
        self.peers: PeerMemory | None = None
        self._first = threading.Lock()  # held for good by the thread that aborts the group
        self._aborted = threading.Event()

    def part_of(self, parts: int | None = None) -> tuple[int, int]:
        """(part, parts): this rank holds the part-th of so many equal parts, of which several ranks in a row hold one.
        parts: None: one for each rank."""
        parts = parts or self.size
        return self.rank * parts // self.size, parts

    def share_memory(self, slot_bytes: int, device: torch.device) -> None:
        """Lets `gather_features` push into the other ranks' memory, if the GPUs allow it. Every rank calls it.

        slot_bytes: bytes of the largest tensor that is gathered so; a larger one goes through the process group.
        """
        from evalengine.layers.peer_memory import NoPeerMemory, PeerMemory

        try:
            self.peers = PeerMemory(self, slot_bytes, device)
        except NoPeerMemory as error:
            logger.warning("the GPUs cannot write to each other's memory (%s): NCCL gathers, more slowly", error)

    def begin(self) -> None:
        """Called when a forward pass begins, on every rank."""
        if self.peers is not None:
            self.peers.begin()

    def gather_features(self, x: Tensor) -> Tensor:
        """`gather` of equal parts, by the quickest way. Whatever reads the result must be launched before the next
        gather, which may overwrite it (kernels/push_gather.py); `keep` copies it."""
        gathered = None if self.peers is None else self.peers.gather(x)
        return self.gather(x) if gathered is None else gathered

    def keep(self, gathered: Tensor) -> Tensor:
        """A copy of what was gathered last, which later gathers leave alone."""
        return gathered.clone() if self.size > 1 else gathered

    def gather(self, x: Tensor, widths: Sequence[int] | None = None) -> Tensor:
        """Every rank's [T, n] -> [T, sum of all n] on each rank, side by side in the order of the ranks.

        widths: every rank's n, where they differ.
        """
        if self.size == 1:
            return x
        widths = widths or [x.shape[1]] * self.size
        widest, rows = max(widths), x.shape[0]
        own = x if x.shape[1] == widest else F.pad(x, (0, widest - x.shape[1]))
        # Tensors travel as bytes: gloo and NCCL then take every dtype, and nothing is computed on the way.
        parts = torch.empty(self.size, rows, widest, dtype=x.dtype, device=x.device)
        gather_bytes(self._group, _bytes(parts), _bytes(own.contiguous()))
        if min(widths) == widest:
            return parts.transpose(0, 1).reshape(rows, -1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in an order that the library chooses; for `fast`, and for sums in which all terms but
        one are zero. May overwrite x."""
        if self.size > 1:
            x = x.contiguous()
            self._group.allreduce([x]).wait()
        return x

    def abort(self) -> None:
        """Gives up what this process waits for, once another rank is lost. The collectives cannot be used any more.

        Returns at once. NCCL lets its kernels go at once, too, but its abort returns only after more than a minute of
        asking the lost process for what they shared.
        """
        if self.peers is not None:
            self.peers.abort()
        threading.Thread(target=self._abort, name="evalengine abort", daemon=True).start()

    def close(self) -> None:
        """Ends the collectives, with their threads and their memory. Every rank calls it, unless one has called
        `abort`: otherwise NCCL waits for the others.

        An abort in progress gets some time: a thread that comes back from torch while the interpreter shuts down would
        end the process by SIGABRT."""
        if self.peers is not None:
            self.peers.close()
        if self._group is not None:
            self._abort()
            self._aborted.wait(SECONDS_TO_ABORT)
        self.peers = self._group = None

    def _abort(self) -> None:
        """Abort the group, unless another call does or did."""
        group = self._group
        if group is not None and self._first.acquire(blocking=False):
            try:
                group.abort()
            finally:
                self._aborted.set()

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank. Overwrites the other ranks' x, which must be contiguous."""
        if self.size > 1:
            self._group.broadcast([x]).wait()
        return x


SINGLE = TensorParallel()


def vocabulary_ranges(vocab_size: int, size: int, block: int) -> list[range]:
    """The token ids of each rank: whole blocks of `block` ids (the last may be shorter), as evenly as possible."""
    blocks = -(-vocab_size // block)
    edges = [min(vocab_size, rank * blocks // size * block) for rank in range(size + 1)]
    return [range(first, end) for first, end in pairwise(edges)]


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
