"""Orders sequences so that those with a common prefix find its pages in the pool."""

from __future__ import annotations

from collections.abc import Iterable

from evalengine.engine.schedule.block_manager import BlockManager
from evalengine.engine.schedule.sequence import Sequence


def in_prefix_order(sequences: Iterable[Sequence], block_manager: BlockManager) -> list[Sequence]:
    """The same sequences in another order: those that begin with the same pages stand near each other, so that the
    pages are still in the pool; and the first of each group stands ahead of the followers of the group before it.

    Otherwise they keep their order. A follower that comes a step after the first of its group also finds the common
    part of their last page, which can be copied only once it is computed.
    """
    order = list(sequences)
    if not block_manager.enable_prefix_caching:
        return order
    first: dict[bytes, int] = {}  # the hash of a prefix -> the place of the first sequence that has it
    shared: set[bytes] = set()
    places: dict[Sequence, list[int]] = {}  # the places of the first sequences with each page, then its own
    for place, seq in enumerate(order):
        hashes = block_manager.page_hashes(seq)
        shared.update(digest for digest in hashes if digest in first)
        places[seq] = [*(first.setdefault(digest, place) for digest in hashes), place]
    leaders = {first[digest] for digest in shared}
    ordered: list[Sequence] = []
    followers: list[Sequence] = []
    for seq in sorted(order, key=places.__getitem__):
        if places[seq][-1] in leaders:
            ordered += [seq, *followers]
            followers = []
        else:
            followers.append(seq)
    return ordered + followers
