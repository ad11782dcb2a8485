"""States that other sequences begin with: the prefix cache of recurrences.

A state is worth a copy only where another sequence will begin with it: `snapshot_at` is the end of the longest prefix
that a waiting sequence has in common with others (`scheduler.in_prefix_order` notes it). A sequence's chunk ends there,
and its state is copied before its next chunk is computed. Sequences that wait for that copy are admitted after it.

The choices after a context begin with its last state (`sequence.ParentState`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Prefix = tuple[int, bytes, tuple[int, ...]]  # the number of tokens, the hash of those in full pages, and the rest


class Snapshots:
    """Which slots hold the state after which prefix."""

    def __init__(self, slots: Iterable[int]) -> None:
        """slots: those of the pools of states that no running sequence takes."""
        self._free = list(slots)
        self.slot_of: OrderedDict[Prefix, int] = OrderedDict()  # least recently used first

    def use(self, prefix: Prefix) -> int:
        """The slot of a prefix that has one."""
        self.slot_of.move_to_end(prefix)
        return self.slot_of[prefix]

    def new_slot(self, prefix: Prefix) -> int:
        """A slot for the state after this prefix. Evicts the least recently used prefix if no slot is free."""
        if not self._free:
            self._free.append(self.slot_of.popitem(last=False)[1])
        self.slot_of[prefix] = self._free.pop()
        return self.slot_of[prefix]

    def clear(self) -> None:
        """Forgets all: a step failed, and it is not known which copies were made."""
        self._free += self.slot_of.values()
        self.slot_of.clear()
