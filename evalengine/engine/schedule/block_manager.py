"""Blocks of the KV pool: who holds which, and which still hold something worth reusing.

A block is the KV of `block_size` consecutive tokens for one group of layers: a page of the pool, or one for each of the
group's block tables (`kv_layout`). A full block is known by the SHA-256 of all tokens up to its end (a chain over
blocks), so that equal prefixes share blocks by reference count. A free block keeps its content until its pages are
handed out again (least recently used first). A hit may also end inside a block: the one with the longest common run of
tokens is copied, and the copy is extended.

A group with a window gives a sequence's blocks back once no query will see them. They stay in the cache like others,
and a prefix is found where each group has what the queries after it see: all of it, or the last tokens.

KV of equal prefixes is equal bit for bit in the batch-invariant levels, so a hit can never change a result there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from evalengine.engine.kv_layout import KVGroup
from evalengine.engine.schedule.prefix_index import ROOT, CachedBlock, PrefixIndex
from evalengine.engine.schedule.sequence import Sequence
from evalengine.engine.schedule.snapshots import Prefix, Snapshots

PASSED = CachedBlock(
    (), 0
)  # replaces, in a sequence's list, the blocks that it gave back, or never had, before a window
WHOLE = (KVGroup(),)  # the groups of a model whose layers all see everything
UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Hit:
    """The cached part of a sequence's prefix."""

    num_blocks: int  # full blocks of the prefix
    shared: list[list[CachedBlock]]  # of each group: the last of these blocks, those that later queries see
    copied: list[CachedBlock] = field(
        default_factory=list
    )  # of each group: the block after them whose first tokens agree
    num_copied: int = 0  # how many of its tokens agree


class BlockManager:
    """Hands out the pages of the KV pool, and finds those that hold a new sequence's prefix."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: SequenceOf[KVGroup] = WHOLE,
        largest_step: int = UNBOUNDED,
        snapshots: Snapshots | None = None,
    ) -> None:
        """num_blocks: how often the pool has room for `block_size` tokens of all layers. largest_step: the most tokens
        that are computed at once."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = tuple(groups)
        self.largest_step = largest_step
        self.snapshots = snapshots  # of a model with recurrent layers, whose prefixes need a state, too
        self.num_tables = sum(group.num_tables for group in self.groups)
        self.num_free_pages = num_blocks * self.num_tables
        self.spare = deque(range(self.num_free_pages))  # pages that belong to no block
        self.free: OrderedDict[CachedBlock, None] = OrderedDict()  # unreferenced blocks, oldest first
        self.indexes = [PrefixIndex(block_size) for _ in self.groups]
        self._windows = any(group.window is not None for group in self.groups)

    @property
    def num_free_blocks(self) -> int:
        """How many more blocks of all groups there is room for."""
        return self.num_free_pages // self.num_tables

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks of a group hold so many tokens."""
        return -(-num_tokens // self.block_size)

    # -- taking blocks -----------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> list[tuple[int, int]] | None:
        """Gives a waiting sequence the cached blocks of its prefix and sets its `num_computed_tokens`.

        Returns the page copies (source, destination) to make before the step runs; None, and nothing taken, if the
        pool could not hold all its present tokens (in a group with a window: as many as it holds at once).
        """
        assert not seq.block_tables
        hit = self._match(seq)
        needed = 0
        for group, shared in zip(self.groups, hit.shared, strict=True):
            most = group.most_blocks(seq.num_tokens, self.block_size, self.largest_step)
            unseen = hit.num_blocks - len(shared)
            fresh = min(self.blocks_for(seq.num_tokens) - unseen, most) - len(shared)
            needed += group.num_tables * (fresh + sum(block.ref_count == 0 for block in shared))
        if needed > self.num_free_pages:
            return None
        for shared in hit.shared:
            for block in shared:
                self._hold(block)
        seq.blocks = [[PASSED] * (hit.num_blocks - len(shared)) + shared for shared in hit.shared]
        seq.num_passed = [hit.num_blocks - len(shared) for shared in hit.shared]
        seq.block_tables = self._tables(seq.blocks)
        seq.num_computed_tokens = seq.num_recorded_tokens = hit.num_blocks * self.block_size
        copies = self._copy(seq, hit)
        seq.num_cached_tokens = seq.last_start = seq.num_computed_tokens
        return copies

    def prefix(self, seq: Sequence, position: int) -> Prefix:
        """The sequence's tokens before a position, as `Snapshots` know them."""
        whole, rest = divmod(position, self.block_size)
        return position, self._parent(seq, whole), tuple(seq.token_ids[position - rest : position])

    def _tables(self, blocks: list[list[CachedBlock]]) -> list[list[int]]:
        """The block tables of each group's blocks; a page before a window may be any (here 0)."""
        tables = []
        for group, own in zip(self.groups, blocks, strict=True):
            tables += [[b.pages[i] if b.pages else 0 for b in own] for i in range(group.num_tables)]
        return tables

    def _copy(self, seq: Sequence, hit: Hit) -> list[tuple[int, int]]:
        """Gives the sequence a copy of the block that the hit ends in, in each group; returns the pages to copy."""
        for source in hit.copied:
            if source in self.free:
                self.free.move_to_end(source)  # it has just been used
        # A source may be what is handed out, here or for another group. All pages are read before one is written, and a
        # page that is copied onto itself is right, too.
        copies: list[tuple[int, int]] = []
        for source, destination in zip(hit.copied, self._append(seq) if hit.copied else [], strict=True):
            copies += zip(source.pages, destination.pages, strict=True)
        start, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_computed_tokens + hit.num_copied
        self._record(seq, start, seq.num_computed_tokens)
        return copies

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes room for the next `num_tokens` tokens and records them. False, and nothing taken, if the pool is full.

        Generated tokens are recorded a block at a time, once the next one is requested: they may not even be known yet,
        and hardly anything but the sequence itself, after a preemption, will look for them. Then, too, blocks that
        windows have passed are given back.
        """
        start = seq.num_computed_tokens
        end, room = start + num_tokens, len(seq.block_tables[0]) * self.block_size
        if end > room:
            needed = self.blocks_for(end - room)
            self._record_generated(seq)
            if self._windows:
                self._give_back_passed(seq)
            if needed * self.num_tables > self.num_free_pages:
                return False
            for _ in range(needed):
                self._append(seq)
        if start < seq.num_prompt_tokens:
            self._record(seq, start, min(end, len(seq.token_ids)))
        return True

    def mark_computed(self, seq: Sequence, start: int, end: int) -> None:
        """Notes that a launched step writes the KV of tokens [start, end): every later step finds them in the pool."""
        seq.last_start, seq.num_computed_tokens = start, end
        if start < seq.num_prompt_tokens:
            self._mark(seq, start, end)

    def release(self, seq: Sequence) -> None:
        """Gives a sequence's blocks back, the last first, so that a prefix outlives its tails."""
        if seq.block_tables:
            self._record_generated(seq)
        for index in reversed(range(len(seq.block_tables[0]) if seq.block_tables else 0)):
            for passed, blocks in zip(seq.num_passed, seq.blocks, strict=True):
                if index >= passed:
                    self._give_back(blocks[index])
        seq.block_tables, seq.blocks, seq.num_passed = [], [], []
        seq.num_computed_tokens = seq.num_recorded_tokens = seq.last_start = 0

    def _give_back_passed(self, seq: Sequence) -> None:
        """Gives back the blocks that no query sees from the step on whose results may not be taken yet: if one is not
        finite, that step is computed once more (`ModelRunner`)."""
        for number, group in enumerate(self.groups):
            first = group.first_seen(seq.last_start, self.block_size)
            for index in range(seq.num_passed[number], first):
                self._give_back(seq.blocks[number][index])
                seq.blocks[number][index] = PASSED
            seq.num_passed[number] = max(seq.num_passed[number], first)

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def _match(self, seq: Sequence) -> Hit:
        """Return the cached part of the sequence's prefix. The hit ends before the first position whose logits are
        wanted, since that position must be computed."""
        limit = seq.first_wanted_position
        if not self.enable_prefix_caching:
            return Hit(0, [[] for _ in self.groups])
        found: list[list[CachedBlock | None]] = [[] for _ in self.groups]
        runs = [0] * len(self.groups)  # how many blocks up to here each group has one after another
        ends = [0]  # the numbers of blocks after which each group has what the next query sees
        for index in range(limit // self.block_size):
            digest = self._hash(seq, index)
            for number, known in enumerate(self.indexes):
                block = known.by_hash.get(digest)
                found[number].append(block)
                runs[number] = 0 if block is None else runs[number] + 1
            end = index + 1
            position = end * self.block_size
            seen = [end - group.first_seen(position, self.block_size) for group in self.groups]
            if all(run >= wanted for run, wanted in zip(runs, seen, strict=True)):
                ends.append(end)
            elif any(not run and group.window is None for run, group in zip(runs, self.groups, strict=True)):
                break
        usable, length = 0, 0
        copied: list[CachedBlock] = []
        if self.snapshots is None:
            usable = ends[-1]
            copied, length = self._within_block(seq, usable, limit)
        # A state is valid at one position only, so all tokens before it must be cached.
        for position in sorted(self._states(seq, limit), reverse=True):
            whole, rest = divmod(position, self.block_size)
            if whole not in ends:
                continue
            parent = seq.parent_state
            if parent and parent.num_tokens == position and all(len(b.token_ids) >= rest for b in parent.blocks):
                blocks, run = parent.blocks, rest
            else:  # not the parent's, or handed out again: other blocks may have the tokens
                blocks, run = self._within_block(seq, whole, position)
            if run == rest:
                usable, copied, length = whole, blocks, run
                break
        start = usable * self.block_size
        shared = [
            [b for b in blocks[group.first_seen(start + length, self.block_size) : usable] if b is not None]
            for group, blocks in zip(self.groups, found, strict=True)
        ]
        return Hit(usable, shared, copied, length)

    def _states(self, seq: Sequence, limit: int) -> Iterator[int]:
        """The positions up to `limit` at which there is a state of the sequence."""
        if seq.parent_state is not None:
            yield seq.parent_state.num_tokens
        for position, parent, rest in () if self.snapshots is None else self.snapshots.slot_of:
            known = position <= limit and parent == self._parent(seq, position // self.block_size)
            if known and rest == tuple(seq.token_ids[position - len(rest) : position]):
                yield position

    def _within_block(self, seq: Sequence, whole: int, limit: int) -> tuple[list[CachedBlock], int]:
        """For each group, the block after `whole` blocks that shares the longest run of the sequence's tokens up to
        `limit`; and the length of the run that is common to all groups."""
        start = whole * self.block_size
        rest = seq.token_ids[start : min(limit, start + self.block_size)]
        ends = [known.longest_run(self._parent(seq, whole), rest) for known in self.indexes]
        length = min((run for _, run in ends), default=0)
        return [block for block, _ in ends if block is not None] if length else [], length

    def _record_generated(self, seq: Sequence) -> None:
        """Records the tokens after the prompt that are known and whose KV is in the pool."""
        start, end = seq.num_recorded_tokens, min(seq.num_computed_tokens, len(seq.token_ids))
        if start < end:
            self._record(seq, start, end)
            self._mark(seq, start, end)

    def _held(self, seq: Sequence, start: int, end: int) -> Iterable[tuple[int, int, CachedBlock]]:
        """The blocks of tokens [start, end) that the sequence holds: their group, place in the sequence, and block."""
        for number, (passed, blocks) in enumerate(zip(seq.num_passed, seq.blocks, strict=True)):
            for index in range(max(start // self.block_size, passed), self.blocks_for(end)):
                yield number, index, blocks[index]

    def _mark(self, seq: Sequence, start: int, end: int) -> None:
        """Notes in the blocks of tokens [start, end) that their KV is there."""
        for _, index, block in self._held(seq, start, end):
            computed = min(end - index * self.block_size, self.block_size)
            assert computed >= block.num_computed
            block.num_computed = computed

    def _record(self, seq: Sequence, start: int, end: int) -> None:
        """Notes that the blocks of tokens [start, end) will hold them. A block's tokens only grow, so those that are
        noted are not looked at again."""
        seq.num_recorded_tokens = end
        if not self.enable_prefix_caching:
            return
        for number, index, block in self._held(seq, start, end):
            first, known = index * self.block_size, self.indexes[number]
            new = seq.token_ids[first + len(block.token_ids) : min(end, first + self.block_size)]
            if not new:
                continue
            if not block.token_ids:
                block.parent = self._parent(seq, index)
            known.extend(block, new)
            if len(block.token_ids) == self.block_size:
                known.complete(block, self._hash(seq, index))

    def page_hashes(self, seq: Sequence) -> list[bytes]:
        """The hashes of the full blocks that the sequence may find in the cache."""
        return [self._hash(seq, index) for index in range(seq.first_wanted_position // self.block_size)]

    def _parent(self, seq: Sequence, whole: int) -> bytes:
        """The hash of the sequence's first so many blocks, which are full."""
        return self._hash(seq, whole - 1) if whole else _root(seq)

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """SHA-256 of the sequence's tokens up to the end of its full block `index`."""
        while len(seq.block_hashes) <= index:
            first = len(seq.block_hashes) * self.block_size
            parent = seq.block_hashes[-1] if seq.block_hashes else _root(seq)
            page = array("i", seq.token_ids[first : first + self.block_size])
            assert len(page) == self.block_size
            seq.block_hashes.append(hashlib.sha256(parent + page.tobytes()).digest())
        return seq.block_hashes[index]

    # -- who holds what ----------------------------------------------------------------------------------------------

    def _hold(self, block: CachedBlock) -> None:
        if block.ref_count == 0:
            del self.free[block]
            self.num_free_pages -= len(block.pages)
        block.ref_count += 1

    def _give_back(self, block: CachedBlock) -> None:
        assert block.ref_count > 0
        block.ref_count -= 1
        if block.ref_count == 0:
            self.num_free_pages += len(block.pages)
            self.free[block] = None
            if block.num_computed < len(block.token_ids):  # a failed step never wrote the KV: no sequence may find it
                self.indexes[block.group].forget(block, keep=block.num_computed)

    def _append(self, seq: Sequence) -> list[CachedBlock]:
        """Adds a block of each group to the sequence: the pages that were freed least recently. What they held is
        forgotten."""
        added = []
        table = 0
        for number, (blocks, group) in enumerate(zip(seq.blocks, self.groups, strict=True)):
            while len(self.spare) < group.num_tables:
                oldest, _ = self.free.popitem(last=False)
                assert oldest.ref_count == 0
                self.indexes[oldest.group].forget(oldest)
                self.spare.extend(oldest.pages)
            block = CachedBlock(tuple(self.spare.popleft() for _ in range(group.num_tables)), number)
            self.num_free_pages -= group.num_tables
            blocks.append(block)
            added.append(block)
            for page in block.pages:
                seq.block_tables[table].append(page)
                table += 1
        return added

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that reference counts, free pages and indexes agree with the live sequences; tests call it."""
        held: defaultdict[CachedBlock, int] = defaultdict(int)
        for seq in sequences:
            tables = iter(seq.block_tables)
            for group, passed, blocks in zip(self.groups, seq.num_passed, seq.blocks, strict=False):  # none: it waits
                assert len(blocks) >= self.blocks_for(seq.num_computed_tokens)
                assert all(block is PASSED for block in blocks[:passed]) and PASSED not in blocks[passed:]
                assert len({*blocks[passed:]}) == len(blocks) - passed
                for i in range(group.num_tables):
                    assert next(tables)[passed:] == [block.pages[i] for block in blocks[passed:]]
                for block in blocks[passed:]:
                    held[block] += 1
        for block, count in held.items():
            assert block.ref_count == count and block not in self.free, (block, count)
        for block in self.free:
            assert block.ref_count == 0 and block.num_computed >= len(block.token_ids), block
        pages = [*self.spare, *(page for block in (*held, *self.free) for page in block.pages)]
        assert sorted(pages) == list(range(len(pages))), "each page is spare or in one block"
        assert self.num_free_pages == len(pages) - sum(len(block.pages) for block in held)
        for known in self.indexes:
            known.check()
            assert all(b in held or b in self.free for bs in known.continuing.values() for b in bs)
            assert all(b in held or b in self.free for b in known.by_hash.values())


def _root(seq: Sequence) -> bytes:
    """The seed of a sequence's block hashes: keys rotated by a different RoPE are different keys."""
    return ROOT if seq.rope_start == 0 else b"long"
