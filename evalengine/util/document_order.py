"""The order in which a run in steps evaluates its documents. It follows from the baseline of its gate: no one chooses
it, and everyone who reads the run gets the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def in_order(baseline: str, task: str, documents: Sequence[int], clusters: Mapping[int, str] | None) -> list[list[int]]:
    """The task's documents in a random order, cluster by cluster: related ones are evaluated together, as statistics
    count them. baseline: its digest. clusters: document -> its cluster; None: documents are unrelated.

    A cluster's place is the SHA-256 of baseline, task and name, so that no library's generator decides it.
    """
    members: dict[str, list[int]] = {}
    for doc in sorted(documents):
        members.setdefault(str(doc) if clusters is None else clusters[doc], []).append(doc)
    places = {name: hashlib.sha256(f"{baseline} {task} {name}".encode()).digest() for name in members}
    return [members[name] for name in sorted(members, key=places.__getitem__)]


def first_of_order(order: Sequence[Sequence[int]], count: int) -> list[int]:
    """The first `count` documents of `in_order`, and the rest of the last one's cluster."""
    chosen: list[int] = []
    for cluster in order:
        if len(chosen) >= count:
            break
        chosen += cluster
    return chosen
