"""Copies of sequences' states at the ends of prefixes, so that others can begin there: the prefix cache of recurrences.

A state is worth a copy only where another sequence will begin with it: `snapshot_at` is the end of the last page that
a waiting sequence has in common with another one, `own_snapshot_at` that of a context whose choices come after it
(`scheduler.in_prefix_order` notes both). A sequence's chunk ends there, and its state is copied before its next chunk
is computed. Sequences that wait for that copy are admitted after it.
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
        self._brief: set[bytes] = set()  # those of them that are wanted only next

    def use(self, digest: bytes) -> int:
        """The slot of a prefix that has one."""
        self.slot_of.move_to_end(digest)
        return self.slot_of[digest]

    def new_slot(self, digest: bytes, brief: bool = False) -> int | None:
        """A slot for the state after this prefix; the prefix that was used least recently may lose its own.

        brief: it is wanted only next, and takes no slot of one that is not; None if all are of such."""
        if not self._free:
            oldest = next((known for known in self.slot_of if known in self._brief), None)
            if oldest is None:
                if brief:
                    return None
                oldest = next(iter(self.slot_of))
            self._brief.discard(oldest)
            self._free.append(self.slot_of.pop(oldest))
        if brief:
            self._brief.add(digest)
        self.slot_of[digest] = self._free.pop()
        return self.slot_of[digest]

    def clear(self) -> None:
        """Forgets all: a step failed, and it is not known which copies were made."""
        self._free += self.slot_of.values()
        self.slot_of.clear()
        self._brief.clear()
