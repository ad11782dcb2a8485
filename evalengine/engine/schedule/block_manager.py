"""Pages of the KV pool: who holds which, and which still hold something worth reusing.

A page (block) holds the KV of `block_size` consecutive tokens. A full page is known by the SHA-256 of all tokens up to
its end (a chain over pages), so that equal prefixes share pages by reference count. A free page keeps its content until
it is handed out again (least recently used first). A hit may also end inside a page: the page with the longest common
run of tokens is copied, and the copy is extended.

KV of equal prefixes is equal bit for bit in the batch-invariant levels, so a hit can never change a result there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from evalengine.engine.schedule.sequence import Sequence

ROOT = b""  # the hash before a sequence's first page
# Pages that begin alike are indexed by their first 1, 8 and 32 tokens: by the first alone, each of N prompts that begin
# with one word would look at the N before it (4,000 hellaswag choices: 0.4 million comparisons, 0.3 s of 1.6).
RUNS = (1, 8, 32)
CANDIDATES = 16  # pages compared, the newest first: the pages of one bucket begin alike, so few differ in worth


@dataclass
class Block:
    """One page of the pool and the tokens whose KV it holds."""

    block_id: int
    ref_count: int = 0
    parent: bytes = ROOT  # hash of the tokens before this page
    hash: bytes | None = None  # hash of the tokens up to the page's end, once the page is full
    token_ids: list[int] = field(default_factory=list)  # tokens whose KV is or will be here
    num_computed: int = 0  # tokens whose KV every step launched from now on finds here


class BlockManager:
    """Hands out the pages of the KV pool, and finds those that hold a new sequence's prefix."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))  # oldest first
        self.by_hash: dict[bytes, int] = {}
        # (A prefix's hash, the first tokens after it) -> the pages that begin so, for each length in `RUNS`.
        self.continuing: defaultdict[tuple[bytes, tuple[int, ...]], dict[int, None]] = defaultdict(dict)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-num_tokens // self.block_size)

    # -- taking pages ------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> list[tuple[int, int]] | None:
        """Gives a waiting sequence the cached pages of its prefix and sets its `num_computed_tokens`.

        Returns the page copies (source, destination) to make before the step runs; None, and nothing taken, if the
        pool could not hold all its present tokens.
        """
        assert not seq.block_table
        shared, copy_from, num_copied = self._match(seq)
        fresh_needed = self.blocks_for(seq.num_tokens) - len(shared)
        revived = sum(self.blocks[b].ref_count == 0 for b in shared)
        if fresh_needed > len(self.free) - revived:
            return None
        for block_id in shared:
            self._hold(block_id)
        seq.block_table = list(shared)
        seq.num_computed_tokens = seq.num_recorded_tokens = len(shared) * self.block_size
        copies = []
        if copy_from is not None:
            if copy_from in self.free:
                self.free.move_to_end(copy_from)  # the page has just been used
            # The source may be the very page that is handed out. It is then copied onto itself, which is right, too.
            destination = self._allocate()
            seq.block_table.append(destination)
            seq.num_computed_tokens += num_copied
            self._record(seq, len(shared) * self.block_size, seq.num_computed_tokens)
            copies.append((copy_from, destination))
        seq.num_cached_tokens = seq.num_computed_tokens
        return copies

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes room for the next `num_tokens` tokens and records them. False, and nothing taken, if the pool is full.

        Generated tokens are recorded a page at a time, once the next page is asked for: they may not even be known yet,
        and hardly anything but the sequence itself, after a preemption, will look for them.
        """
        start = seq.num_computed_tokens
        end, room = start + num_tokens, len(seq.block_table) * self.block_size
        if end > room:
            needed = self.blocks_for(end - room)
            if needed > len(self.free):
                return False
            self._record_generated(seq)
            seq.block_table.extend(self._allocate() for _ in range(needed))
        if start < seq.num_prompt_tokens:
            self._record(seq, start, min(end, len(seq.token_ids)))
        return True

    def mark_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Notes that a launched step writes the KV of tokens [start, end): every later step finds them in the pool."""
        seq.num_computed_tokens = end
        if start < seq.num_prompt_tokens:
            self._mark(seq, start, end)

    def release(self, seq: Sequence) -> None:
        """Gives a sequence's pages back, the last first, so that a prefix outlives its tails."""
        self._record_generated(seq)
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                self._forget_uncomputed(block)
                self.free[block_id] = None
        seq.block_table = []
        seq.num_computed_tokens = seq.num_recorded_tokens = 0

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def _match(self, seq: Sequence) -> tuple[list[int], int | None, int]:
        """Cached full pages of the prefix, then the page whose run is copied and the run's length. The hit ends before
        the first position whose logits are wanted, since that position must be computed."""
        limit = seq.first_wanted_position
        if not self.enable_prefix_caching:
            return [], None, 0
        shared: list[int] = []
        parent = ROOT
        for index in range(limit // self.block_size):
            digest = self._hash(seq, index)
            if digest not in self.by_hash:
                break
            shared.append(self.by_hash[digest])
            parent = digest
        start = len(shared) * self.block_size
        rest = seq.token_ids[start : min(limit, start + self.block_size)]
        return shared, *self._longest_run(parent, rest)

    def _longest_run(self, parent: bytes, rest: list[int]) -> tuple[int | None, int]:
        """The page after `parent` that has the longest computed run of `rest`'s first tokens, and the run's length."""
        best, length = None, 0
        for size in reversed(RUNS):
            if length or len(rest) < size:
                continue
            newest = reversed(self.continuing.get((parent, tuple(rest[:size])), {}))
            # Pages of the step being scheduled have nothing computed yet.
            computed = (b for b in newest if self.blocks[b].num_computed)
            for block_id in islice(computed, CANDIDATES):
                block, longer = self.blocks[block_id], length + 1
                if longer > len(rest):
                    break
                if block.num_computed < longer or block.token_ids[:longer] != rest[:longer]:
                    continue  # most pages of a bucket are no better than the best so far: one comparison tells
                best, length = block_id, min(_common_run(block.token_ids, rest), block.num_computed)
        return best, length

    def _record_generated(self, seq: Sequence) -> None:
        """Records the tokens after the prompt that are known and whose KV is in the pool."""
        start, end = seq.num_recorded_tokens, min(seq.num_computed_tokens, len(seq.token_ids))
        if start < end:
            self._record(seq, start, end)
            self._mark(seq, start, end)

    def _mark(self, seq: Sequence, start: int, end: int) -> None:
        """Notes in the pages of tokens [start, end) that their KV is there."""
        for index in range(start // self.block_size, self.blocks_for(end)):
            block = self.blocks[seq.block_table[index]]
            computed = min(end - index * self.block_size, self.block_size)
            assert computed >= block.num_computed
            block.num_computed = computed

    def _record(self, seq: Sequence, start: int, end: int) -> None:
        seq.num_recorded_tokens = end
        if self.enable_prefix_caching:
            for index in range(start // self.block_size, self.blocks_for(end)):
                self._record_page(seq, index, seq.block_table[index], end)

    def _record_page(self, seq: Sequence, index: int, block_id: int, end: int) -> None:
        """Notes which tokens page number `index` of the sequence will hold, and indexes the page. A page's tokens only
        grow, so those that are noted are not looked at again."""
        block = self.blocks[block_id]
        first = index * self.block_size
        new = seq.token_ids[first + len(block.token_ids) : min(end, first + self.block_size)]
        if not new:
            return
        num_recorded = len(block.token_ids)
        if not num_recorded:
            block.parent = self._hash(seq, index - 1) if index else ROOT
        block.token_ids.extend(new)
        for size in RUNS:
            if num_recorded < size <= len(block.token_ids):
                self.continuing[block.parent, tuple(block.token_ids[:size])][block_id] = None
        if len(block.token_ids) == self.block_size:
            block.hash = self._hash(seq, index)
            self.by_hash.setdefault(block.hash, block_id)

    def page_hashes(self, seq: Sequence) -> list[bytes]:
        """The hashes of the full pages that the sequence may find in the cache."""
        return [self._hash(seq, index) for index in range(seq.first_wanted_position // self.block_size)]

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """SHA-256 of the sequence's tokens up to the end of its full page `index`."""
        while len(seq.block_hashes) <= index:
            first = len(seq.block_hashes) * self.block_size
            parent = seq.block_hashes[-1] if seq.block_hashes else ROOT
            page = array("i", seq.token_ids[first : first + self.block_size])
            assert len(page) == self.block_size
            seq.block_hashes.append(hashlib.sha256(parent + page.tobytes()).digest())
        return seq.block_hashes[index]

    def _hold(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free[block_id]
        block.ref_count += 1

    def _forget_uncomputed(self, block: Block) -> None:
        """Drops the tokens whose KV a failed step never wrote: no sequence may find them."""
        if block.num_computed < len(block.token_ids):
            self._unhash(block)
            self._unlist(block, keep=block.num_computed)
            block.token_ids = block.token_ids[: block.num_computed]

    def _unhash(self, block: Block) -> None:
        if block.hash is not None and self.by_hash.get(block.hash) == block.block_id:
            del self.by_hash[block.hash]
        block.hash = None

    def _unlist(self, block: Block, keep: int = 0) -> None:
        """Takes the page out of the index, except under runs of up to `keep` tokens."""
        for size in RUNS:
            if keep < size <= len(block.token_ids):
                key = (block.parent, tuple(block.token_ids[:size]))
                del self.continuing[key][block.block_id]
                if not self.continuing[key]:
                    del self.continuing[key]

    def _allocate(self) -> int:
        """Takes the least recently freed page: its content is forgotten, and it has one holder."""
        block_id, _ = self.free.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0
        self._unhash(block)
        self._unlist(block)
        self.blocks[block_id] = Block(block_id, ref_count=1)
        return block_id

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that reference counts, free list and indexes agree with the live sequences; tests call it."""
        held: defaultdict[int, int] = defaultdict(int)
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert len(seq.block_table) >= self.blocks_for(seq.num_computed_tokens)
            for block_id in seq.block_table:
                held[block_id] += 1
        for block in self.blocks:
            assert block.ref_count == held[block.block_id], (block, held[block.block_id])
            assert (block.block_id in self.free) == (block.ref_count == 0), block
            assert block.num_computed <= self.block_size
            assert block.ref_count or block.num_computed >= len(block.token_ids), block
        for digest, block_id in self.by_hash.items():
            assert self.blocks[block_id].hash == digest
        for (parent, first), pages in self.continuing.items():
            assert pages
            for block in (self.blocks[b] for b in pages):
                assert block.parent == parent and tuple(block.token_ids[: len(first)]) == first


def _common_run(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
