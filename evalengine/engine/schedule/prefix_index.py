"""Which blocks hold a prefix: by the hash of all its tokens, and by the first tokens after it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice

ROOT = b""  # the hash before a sequence's first block
# Blocks that begin alike are indexed by their first 1, 8 and 32 tokens: by the first alone, each of N prompts that
# begin with one word would look at the N before it (4,000 hellaswag choices: 0.4 million comparisons, 0.3 s of 1.6).
RUNS = (1, 8, 32)
CANDIDATES = 16  # blocks compared, the newest first: those of one bucket begin alike, so few differ in worth


@dataclass(eq=False)
class CachedBlock:
    """The KV of a page's tokens for a group of layers, and the tokens."""

    pages: tuple[int, ...]  # one in each of the group's block tables
    group: int
    ref_count: int = 1
    parent: bytes = ROOT  # hash of the tokens before this block
    hash: bytes | None = None  # hash of the tokens up to the block's end, once it is full
    token_ids: list[int] = field(default_factory=list)  # tokens whose KV is or will be here
    num_computed: int = 0  # tokens whose KV every step launched from now on finds here


class PrefixIndex:
    """The blocks of one group of layers, by what they hold."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.by_hash: dict[bytes, CachedBlock] = {}
        # (A prefix's hash, the first tokens after it) -> the blocks that begin so, for each length in `RUNS`.
        self.continuing: defaultdict[tuple[bytes, tuple[int, ...]], dict[CachedBlock, None]] = defaultdict(dict)

    def longest_run(self, parent: bytes, rest: list[int]) -> tuple[CachedBlock | None, int]:
        """The block after `parent` that has the longest computed run of `rest`'s first tokens, and the run's length."""
        best, length = None, 0
        for size in reversed(RUNS):
            if length or len(rest) < size:
                continue
            newest = reversed(self.continuing.get((parent, tuple(rest[:size])), {}))
            # Blocks of the step being scheduled have nothing computed yet.
            computed = (block for block in newest if block.num_computed)
            for block in islice(computed, CANDIDATES):
                longer = length + 1
                if longer > len(rest):
                    break
                if block.num_computed < longer or block.token_ids[:longer] != rest[:longer]:
                    continue  # most blocks of a bucket are no better than the best so far: one comparison tells
                best, length = block, min(common_run(block.token_ids, rest), block.num_computed)
        return best, length

    def extend(self, block: CachedBlock, new: list[int]) -> None:
        """Notes that the block will hold these further tokens, under their first ones."""
        num_recorded = len(block.token_ids)
        block.token_ids.extend(new)
        for size in RUNS:
            if num_recorded < size <= len(block.token_ids):
                self.continuing[block.parent, tuple(block.token_ids[:size])][block] = None

    def complete(self, block: CachedBlock, digest: bytes) -> None:
        """Notes the hash of a block that is full."""
        block.hash = digest
        self.by_hash.setdefault(digest, block)

    def forget(self, block: CachedBlock, keep: int = 0) -> None:
        """Drops all that is known of the block but its first `keep` tokens."""
        if block.hash is not None and self.by_hash.get(block.hash) is block:
            del self.by_hash[block.hash]
        block.hash = None
        for size in RUNS:
            if keep < size <= len(block.token_ids):
                key = (block.parent, tuple(block.token_ids[:size]))
                del self.continuing[key][block]
                if not self.continuing[key]:
                    del self.continuing[key]
        block.token_ids = block.token_ids[:keep]

    def check(self) -> None:
        """Asserts that each block is found by what it holds; tests call it."""
        for digest, block in self.by_hash.items():
            assert block.hash == digest
        for (parent, first), blocks in self.continuing.items():
            assert blocks
            assert all(b.parent == parent and tuple(b.token_ids[: len(first)]) == first for b in blocks)


def common_run(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
