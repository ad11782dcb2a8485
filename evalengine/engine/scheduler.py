"""Which tokens the next step computes.

One rule serves prefill, chunked prefill and decode: every sequence has `num_tokens`, of which `num_computed_tokens`
have their KV in the pool, and a step computes as many of the rest as the budget allows. Running sequences come first,
in the order they were admitted; when the pool is full the last admitted is preempted, and computed again later.

Whatever this chooses changes no bit of a batch-invariant level's results.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evalengine.engine.block_manager import BlockManager
from evalengine.engine.sequence import Sequence, Status


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in this step."""

    seq: Sequence
    start: int
    end: int


@dataclass
class Schedule:
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # pages to copy before the step: (source, destination)

    @property
    def num_tokens(self) -> int:
        return sum(c.end - c.start for c in self.chunks)


class Scheduler:
    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def add_first(self, seqs: list[Sequence]) -> None:
        """Ahead of all waiting ones: their common prefix has just been computed and is still in the pool."""
        self.waiting.extendleft(reversed(seqs))

    def schedule(self) -> Schedule:
        schedule = Schedule()
        preempted = self._schedule_running(schedule)
        if not preempted:
            self._admit_waiting(schedule)
        assert schedule.chunks or not self.has_work, (
            "work is left but nothing fits: LLM.submit must refuse such requests"
        )
        return schedule

    def decodes_after(self, last: list[Chunk], ending: set[Sequence]) -> list[Sequence]:
        """The sequences that the step after `last` decodes before the tokens of `last`, a step of decodes, are known on
        the host; none if the host must know them first, because a sequence that waits could be admitted, or pages might
        run out.

        ending: those that have all their tokens with this step's. All others go on by one token; one of them that
        turns out to have ended (EOS, a stop string) is computed once in vain.
        """
        alive = [chunk.seq for chunk in last if chunk.seq.status is Status.RUNNING]
        going = [seq for seq in alive if seq not in ending]
        size = self.block_manager.block_size
        pages = sum(len(seq.block_table) * size == seq.num_computed_tokens for seq in going)
        left = self.block_manager.num_free_blocks - pages
        if len(alive) < len(self.running) or left < 0:
            return []
        place = self.waiting and len(going) < self.max_num_seqs
        somebody_left = ending or len(alive) < len(last)  # who waits may share pages, so ask `admit` after every end
        if place and (somebody_left or self.block_manager.blocks_for(self.waiting[0].num_tokens) <= left):
            return []
        return going

    def continue_decodes(self, seqs: list[Sequence]) -> Schedule:
        """One more token for each of `decodes_after`'s sequences, whose last tokens are still being computed."""
        for seq in seqs:
            extended = self.block_manager.extend(seq, 1)
            assert extended, "decodes_after() has made sure of room"
        return Schedule([self._chunk(seq, 1) for seq in seqs])

    def finish(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        self.running.remove(seq)
        self.block_manager.release(seq)
        self.add_first(seq.then)

    def abort(self) -> None:
        """Takes back every sequence and its pages."""
        for seq in self.running:
            self.block_manager.release(seq)
        self.running.clear()
        self.waiting.clear()

    def _schedule_running(self, schedule: Schedule) -> bool:
        """Chunks for the sequences that already hold pages; True if one had to be preempted."""
        budget = self.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            num_new = min(seq.num_tokens - seq.num_computed_tokens, budget)
            # victims come from the tail, so none of them has been given a chunk in this step
            while not self.block_manager.extend(seq, num_new):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is seq:
                    break
            if seq.status is Status.RUNNING:
                schedule.chunks.append(self._chunk(seq, num_new))
                budget -= num_new
                index += 1
        return preempted

    def _admit_waiting(self, schedule: Schedule) -> None:
        budget = self.max_num_batched_tokens - schedule.num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            copies = self.block_manager.admit(seq)
            if copies is None:
                return
            num_new = min(seq.num_tokens - seq.num_computed_tokens, budget)
            extended = self.block_manager.extend(seq, num_new)
            assert extended, "admit() has made sure of room"
            self.waiting.popleft()
            seq.status = Status.RUNNING
            self.running.append(seq)
            self.num_cached_tokens += seq.num_cached_tokens
            schedule.chunks.append(self._chunk(seq, num_new))
            schedule.copies.extend(copies)
            budget -= num_new

    def _preempt(self, seq: Sequence) -> None:
        """Takes all pages back; the sequence's tokens stay, and their KV is computed again (recompute)."""
        self.block_manager.release(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    @staticmethod
    def _chunk(seq: Sequence, num_new: int) -> Chunk:
        return Chunk(seq, seq.num_computed_tokens, seq.num_computed_tokens + num_new)
