"""States that other sequences begin with: the prefix cache of recurrences.

A state is worth a copy only where another sequence will begin with it: `snapshot_at` is the end of the last page that
a waiting sequence has in common with another one (`scheduler.in_prefix_order` notes it). A sequence's chunk ends there,
and its state is copied before its next chunk is computed. Sequences that wait for that copy are admitted after it.

The choices after a context begin with its last state (`Bequest`), wherever in a page the context ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalengine.engine.schedule.sequence import Sequence


@dataclass(eq=False)
class Bequest:
    """The state behind a context, left in the slot in which it was computed, for the sequences that continue it. Each
    copies it when it is admitted; the last one takes the slot."""

    slot: int
    num_tokens: int  # of the context
    heirs: list[Sequence]  # that are not admitted yet


class Snapshots:
    """Which slots hold the state after which prefix."""

    def __init__(self, slots: Iterable[int]) -> None:
        """slots: those of the pools of states that no running sequence takes."""
        self._free = list(slots)
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()  # a prefix's hash -> its slot, least recently used first

    def use(self, digest: bytes) -> int:
        """The slot of a prefix that has one."""
        self.slot_of.move_to_end(digest)
        return self.slot_of[digest]

    def new_slot(self, digest: bytes) -> int:
        """A slot for the state after this prefix; the prefix that was used least recently may lose its own."""
        if not self._free:
            self._free.append(self.slot_of.popitem(last=False)[1])
        self.slot_of[digest] = self._free.pop()
        return self.slot_of[digest]

    def clear(self) -> None:
        """Forgets all: a step failed, and it is not known which copies were made."""
        self._free += self.slot_of.values()
        self.slot_of.clear()
