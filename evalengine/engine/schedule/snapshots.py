"""Copies of sequences' states at the ends of prefixes, so that others can begin there: the prefix cache of recurrences.

A state is worth a copy only where another sequence will begin with it: `wanted_at` is the end of the last page that a
waiting sequence has in common with another one (`scheduler.in_prefix_order` notes it). A sequence's chunk ends there,
and its state is copied before its next chunk is computed. Sequences that wait for that copy are admitted after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


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
        slot = self._free.pop() if self._free else self.slot_of.popitem(last=False)[1]
        self.slot_of[digest] = slot
        return slot

    def clear(self) -> None:
        """Forgets all: a step failed, and it is not known which copies were made."""
        self._free += self.slot_of.values()
        self.slot_of.clear()
