"""The digest of a run: equal digests mean equal bits.

A leaf is one request: SHA-256 over (digest version, task, document, request index, repeat, prompt ids, output ids,
logprobs), each field preceded by its length, so that no two different requests share a preimage. Ids are int32 and
logprobs float32, little-endian. Time, paths, library versions, texts and top-n alternatives stay out.

The run's digest is the Merkle tree hash of RFC 6962, section 2.1, over the leaves in (task, document, request index,
repeat) order: leaves and inner nodes are hashed under different prefixes, so a leaf cannot pass for a node.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from evalengine.records.schema import RequestRecord, packed_ids
from evalengine.util.forked import spread

DIGEST_VERSION = 1
MANY = 10_000  # records that earn a process: some 0.2 s of hashing
_LEAF, _NODE = b"\x00", b"\x01"


def leaf_hash(record: RequestRecord) -> bytes:
    """The 32 bytes that stand for one request."""
    assert len(record.output_ids) == len(record.logprobs), f"{record.key}: a logprob a token"
    assert record.logprobs.dtype == np.float32, f"{record.key}: logprobs are {record.logprobs.dtype}, not float32"
    prompt, output = packed_ids(record.prompt_ids), packed_ids(record.output_ids)
    logprobs = record.logprobs.astype("<f4", copy=False).tobytes()
    numbers = struct.pack("<QqQqQqQ", 8, record.doc_id, 8, record.request_index, 8, record.repeat, len(prompt))
    output_length, logprobs_length = struct.pack("<Q", len(output)), struct.pack("<Q", len(logprobs))
    hasher = _beginning(record.task).copy()
    hasher.update(b"".join((numbers, prompt, output_length, output, logprobs_length, logprobs)))
    return hasher.digest()


@cache
def _beginning(task: str) -> Any:
    """The hash of a leaf's first three fields, which all records of a task share."""
    fields = (b"evalengine", struct.pack("<I", DIGEST_VERSION), task.encode())
    return hashlib.sha256(_LEAF + b"".join(struct.pack("<Q", len(field)) + field for field in fields))


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The 32-byte root over leaf hashes; SHA-256 of nothing if there are none."""
    if not leaves:
        return hashlib.sha256().digest()
    level = list(leaves)
    while len(level) > 1:  # an odd last node moves up unchanged: the same tree as RFC 6962's split at a power of two
        pairs = [hashlib.sha256(_NODE + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def merkle_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """RFC 6962's audit path (section 2.1.1): the nodes that, with leaf number `index`, give the root; lowest first."""
    path, level = [], list(leaves)
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        level = [merkle_root(level[i : i + 2]) for i in range(0, len(level), 2)]
        index //= 2
    return path


def root_of_path(leaf: bytes, index: int, count: int, path: Sequence[bytes]) -> bytes | None:
    """The root of the tree of `count` leaves whose number `index` is `leaf`; None for a path of another shape.

    Trees of several sizes have paths of one shape: a root vouches for the leaf and its place, not for `count`.
    """
    node, remaining = leaf, list(path)
    if not 0 <= index < count:
        return None
    while count > 1:
        if index ^ 1 < count:  # otherwise the node is an odd last one, which moves up unchanged
            if not remaining:
                return None
            sibling = remaining.pop(0)
            node = hashlib.sha256(_NODE + (sibling + node if index & 1 else node + sibling)).digest()
        index, count = index // 2, (count + 1) // 2
    return None if remaining else node


@dataclass(frozen=True)
class Digests:
    """The hashes of all records of a run, 64 hex digits each."""

    run: str
    tasks: dict[str, str]  # digest by task, so that it shows at a glance which task differs


def digests(records: Iterable[RequestRecord]) -> Digests:
    """The digests of a run's records, in whatever order they come."""
    ordered = sorted(records, key=lambda record: record.key)
    assert len({record.key for record in ordered}) == len(ordered), "two records of one request"
    leaves = spread(lambda some: [leaf_hash(record) for record in some], ordered, MANY)
    by_task = groupby(zip(ordered, leaves, strict=True), key=lambda pair: pair[0].task)
    tasks = {task: merkle_root([leaf for _, leaf in group]).hex() for task, group in by_task}
    return Digests(merkle_root(leaves).hex(), tasks)
