"""Decides which tokens the next step computes.

One rule serves prefill, chunked prefill and decode: every sequence has `num_expected_tokens` (those that are known, and
at most one that the step in flight chooses), of which `num_computed_tokens` have their KV in the pool, and a step
computes as many of the rest as the budget allows. Running sequences come first, in the order they were admitted; when
the pool is full the last admitted one is preempted, and computed again later.

No choice of the scheduler changes a bit of a batch-invariant level's results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from evalengine.engine.schedule.block_manager import BlockManager
from evalengine.engine.schedule.drafts import Drafter
from evalengine.engine.schedule.prefix_index import common_run
from evalengine.engine.schedule.sequence import ParentState, Sequence, Status
from evalengine.kernels.recurrent_variant import Recurrence, may_start_elsewhere, most_guesses


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence, to be computed in this step."""

    seq: Sequence
    start: int
    end: int
    guesses: tuple[int, ...] = ()  # the last of these tokens, which are not known but guessed (`drafts`)


@dataclass
class SchedulerOutput:
    """One step: the chunks to compute, and the pages to copy before."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source page, destination page)
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # likewise of states, one after another

    @property
    def num_tokens(self) -> int:
        return sum(c.end - c.start for c in self.chunks)


class Scheduler:
    """Holds the sequences that wait, run or leave, and gives each step its share of them."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafter: Drafter | None = None,
        recurrences: SequenceOf[Recurrence] = (),
    ) -> None:
        """drafter: guesses tokens that are computed together with the known ones; None: nothing is guessed.
        recurrences: those of the model, whose states limit the guesses of a step."""
        assert bool(recurrences) == (block_manager.snapshots is not None), "recurrent layers have states"
        self.block_manager, self.drafter, self.recurrences = block_manager, drafter, recurrences
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.leaving: set[Sequence] = set()  # sequences whose last step is launched and whose results are not taken
        # Places in the pools of states: one for each running sequence and each parent's state.
        self.free_slots = list(range(max_num_seqs))
        self.parent_states: list[ParentState] = []
        # Slots of other sequences that the step being planned reads. Their contents must stay until it is launched.
        self.read_slots: set[int] = set()
        self.freed_slots: list[int] = []  # parents' slots among them, which become free then
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.leaving)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not finished."""
        return [*self.running, *self.leaving, *self.waiting]

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> SchedulerOutput:
        """The next step; every token of the steps before it is known."""
        schedule = SchedulerOutput()
        preempted = self._schedule_running(schedule)
        if not preempted:
            self._admit_waiting(schedule)
            self._add_guesses(schedule)
        assert schedule.chunks or not self.has_work, (
            "work is left but nothing fits: LLM.submit must refuse such requests"
        )
        return schedule

    def schedule_ahead(self) -> SchedulerOutput | None:
        """The step after one whose tokens are still being computed on the device, where the new step takes them.

        None if a sequence might have to be preempted (the step's results may free pages), or if there is nothing to do
        without the results. A sequence that turns out to have ended (EOS, a stop string) has one speculative
        token after its end, which is never read. None, too, where the tokens are wanted to guess those after them.
        """
        if self.drafter is not None:
            if self.drafter.is_due(self.running):
                return None
            self.drafter.wait()
        free, most = self.block_manager.num_free_blocks, self.block_manager.blocks_for(self.max_num_batched_tokens)
        if free < most + len(self.running) and free < sum(self._missing_blocks(seq) for seq in self.running):
            return None
        schedule = SchedulerOutput()
        preempted = self._schedule_running(schedule)
        assert not preempted, "there are pages for everything that runs"
        self._admit_waiting(schedule)
        return schedule if schedule.chunks else None

    def launched(self, chunk: Chunk) -> None:
        """Notes that a step with this chunk is launched. From here on the KV of the chunk's tokens counts as present,
        since every step that reads it is launched later. A sequence with nothing left to compute makes room at once."""
        seq = chunk.seq
        self._free_read_slots()
        self.block_manager.mark_computed(seq, chunk.start, chunk.end)
        if seq.launched(chunk.end):
            seq.status = Status.DRAINING
            self.running.remove(seq)
            if seq.successors and self.block_manager.snapshots is not None:
                self._hold_state(seq)
            else:
                self._free_slot(seq)  # a sequence that takes it is launched later, and begins with zeros
            self.leaving.add(seq)
            # They go ahead of all waiting sequences: their common prefix is the newest in the pool.
            self.waiting.extendleft(reversed(seq.successors))

    def finish(self, seq: Sequence) -> None:
        """Gives back the pages of a sequence whose last result has been taken."""
        if seq.status is Status.DRAINING:
            self.leaving.remove(seq)
        else:
            self.running.remove(seq)
            self._free_slot(seq)
        seq.status = Status.FINISHED
        self.block_manager.release(seq)
        if self.drafter is not None:
            self.drafter.forget(seq)

    def drop(self, request_ids: Set[int]) -> None:
        """Remove the sequences that serve only these cancelled requests.

        A step in flight may still write to their pages and give their tokens: as after a token that ends a sequence,
        its kernels come before those of the pages' next owner, and its results are not read.
        """
        for seq in self.sequences:
            if seq.request_ids <= request_ids:
                if seq.status is Status.WAITING:
                    self._detach(seq)
                    self.waiting.remove(seq)
                    seq.status = Status.FINISHED
                else:
                    self.finish(seq)

    def abort(self) -> None:
        """Takes back every sequence and its pages."""
        for seq in (*self.running, *self.leaving):
            self.block_manager.release(seq)
        self.free_slots = list(range(self.max_num_seqs))
        self.read_slots.clear()
        self.freed_slots.clear()
        self.parent_states.clear()
        if self.has_work and self.block_manager.snapshots is not None:  # a step may have been planned, not launched
            self.block_manager.snapshots.clear()
        self.running.clear()
        self.leaving.clear()
        self.waiting.clear()
        if self.drafter is not None:
            self.drafter.end_run()

    def _missing_blocks(self, seq: Sequence) -> int:
        """How many new pages a step needs to compute all of the sequence's tokens."""
        num_new = min(seq.num_expected_tokens - seq.num_computed_tokens, self.max_num_batched_tokens)
        return self.block_manager.blocks_for(seq.num_computed_tokens + num_new) - len(seq.block_tables[0])

    def _schedule_running(self, schedule: SchedulerOutput) -> bool:
        """Adds chunks for the sequences that already hold pages; True if one had to be preempted."""
        budget = self.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            num_new = min(seq.num_expected_tokens - seq.num_computed_tokens, budget)
            if seq.snapshot_at:
                num_new = self._with_snapshot(schedule, seq, num_new)
            # Victims come from the tail, so none of them has been given a chunk in this step.
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

    def _admit_waiting(self, schedule: SchedulerOutput) -> None:
        """Adds chunks for waiting sequences, as long as pages, places and the token budget last."""
        budget = self.max_num_batched_tokens - schedule.num_tokens
        reserved = self._reserved() if self.waiting else 0
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seq.snapshot_at and self._comes_soon(seq):
                return
            parent_state = seq.parent_state
            wanted = 1 + self._reserves(seq)
            if parent_state is None and wanted > len(self.free_slots) - reserved and self.running:
                return
            if not self._has_slot(parent_state):
                # Not in a step planned ahead: without pages for a chunk it is dropped, and its copies with it.
                if self.running or self.leaving or not self.parent_states:
                    return
                self._release_state(schedule, self.parent_states[-1])
                continue
            copies = self.block_manager.admit(seq)
            if copies is None:
                return
            num_new = min(seq.num_tokens - seq.num_computed_tokens, budget)
            num_new = self._until_snapshot(seq, num_new)
            extended = self.block_manager.extend(seq, num_new)
            assert extended, "admit() has made sure of room"
            self.waiting.popleft()
            seq.status = Status.RUNNING
            self._take_slot(schedule, seq, num_new)
            self.running.append(seq)
            self.num_cached_tokens += seq.num_cached_tokens
            schedule.chunks.append(self._chunk(seq, num_new))
            schedule.copies.extend(copies)
            budget -= num_new
            if parent_state is None:
                reserved += self._reserves(seq)
            elif len(parent_state.children) == 1:
                reserved -= 1

    def _reserves(self, seq: Sequence) -> bool:
        """Whether to reserve a slot for a sequence's successors, so that at least one of them can run at a time. A
        single successor takes over the sequence's slot."""
        return self.block_manager.snapshots is not None and len(seq.successors) > 1

    def _reserved(self) -> int:
        """Slots reserved for successors of running and of finished sequences."""
        running = sum(map(self._reserves, self.running))
        return running + sum(len(state.children) > 1 for state in self.parent_states)

    def _has_slot(self, parent_state: ParentState | None) -> bool:
        """Whether there is a slot for a sequence with this parent's state. The last child may take over its slot."""
        if parent_state is None or len(parent_state.children) > 1 or parent_state.slot in self.read_slots:
            return bool(self.free_slots)
        return True

    def _take_slot(self, schedule: SchedulerOutput, seq: Sequence, num_new: int) -> None:
        """Gives an admitted sequence a slot, with the state after its cached tokens."""
        parent_state, snapshots, start = seq.parent_state, self.block_manager.snapshots, seq.num_computed_tokens
        self._detach(seq)
        slot = None  # of the state
        if parent_state is not None and start == parent_state.num_tokens:
            slot = parent_state.slot
            if slot in self.freed_slots and all(num_new - 1 <= most_guesses(kind, start) for kind in self.recurrences):
                self.freed_slots.remove(slot)  # the step only adds rows, which the other readers ignore
                self.free_slots.append(slot)
        elif snapshots is not None and start:
            slot = snapshots.use(self.block_manager.prefix(seq, start))
        seq.start_slot = seq.state_slot = self.free_slots.pop()
        if slot is None or slot == seq.state_slot:
            return
        end = start + num_new
        if seq.ends_at(end) and not seq.successors and may_start_elsewhere(start, end):
            self.read_slots.add(slot)  # a snapshot cannot change either: copies into snapshots are planned earlier
            seq.start_slot = slot
        else:
            schedule.state_copies.append((slot, seq.state_slot))

    def _free_read_slots(self) -> None:
        """Free the parents' slots that only launched steps read."""
        self.free_slots += self.freed_slots
        self.freed_slots.clear()
        self.read_slots.clear()

    def _hold_state(self, seq: Sequence) -> None:
        """Holds a finished sequence's state in its slot for its successors."""
        partial = seq.num_tokens % self.block_manager.block_size > 0
        blocks = [own[-1] for own in seq.blocks] if partial else []
        parent_state = ParentState(seq.state_slot, seq.num_tokens, [*seq.successors], blocks)
        self.parent_states.append(parent_state)
        for child in parent_state.children:
            child.parent_state = parent_state
        seq.state_slot = -1

    def _release_state(self, schedule: SchedulerOutput, state: ParentState) -> None:
        """Frees the slot of a parent's state, which becomes a snapshot for the children."""
        snapshots = self.block_manager.snapshots
        assert snapshots is not None, "only recurrent layers have states"
        slot = snapshots.new_slot(self.block_manager.prefix(state.children[0], state.num_tokens))
        schedule.state_copies.append((state.slot, slot))
        for child in [*state.children]:
            self._detach(child)

    def _detach(self, seq: Sequence) -> None:
        """Removes a sequence from its parent's children, and frees the slot after the last one."""
        if (parent_state := seq.parent_state) is None:
            return
        seq.parent_state = None
        parent_state.children.remove(seq)
        if not parent_state.children:
            self.parent_states.remove(parent_state)
            free = self.freed_slots if parent_state.slot in self.read_slots else self.free_slots
            free.append(parent_state.slot)

    def _add_guesses(self, schedule: SchedulerOutput) -> None:
        """Add drafts to a step of decodes, within the pages and the token budget.
        Wrong ones leave KV and rows of states behind, which the right tokens overwrite before anything reads them. That
        holds for as many guesses as the recurrences allow."""
        chunks = schedule.chunks
        if self.drafter is None or any(c.end - c.start > 1 or c.end < c.seq.num_tokens for c in chunks):
            return
        found = self.drafter.propose([c.seq for c in chunks])
        for place, chunk in enumerate(chunks):
            room = self.max_num_batched_tokens - schedule.num_tokens
            room = min([room, *(most_guesses(kind, chunk.start) for kind in self.recurrences)])
            guesses = found.get(chunk.seq.seq_id, [])[:room]
            if guesses and self.block_manager.extend(chunk.seq, 1 + len(guesses)):
                chunks[place] = chunk._replace(end=chunk.end + len(guesses), guesses=tuple(guesses))

    def _preempt(self, seq: Sequence) -> None:
        """Takes all pages of a sequence back; its tokens stay, and their KV is computed again later (recompute)."""
        self.block_manager.release(seq)
        self._free_slot(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _until_snapshot(self, seq: Sequence, num_new: int) -> int:
        """Limits a chunk so that it ends where the sequence's state is copied."""
        left = seq.snapshot_at - seq.num_computed_tokens
        return min(num_new, left) if left > 0 else num_new

    def _with_snapshot(self, schedule: SchedulerOutput, seq: Sequence, num_new: int) -> int:
        """Has the state copied before the step if the sequence is at `snapshot_at`; returns the chunk's tokens."""
        snapshots, place = self.block_manager.snapshots, seq.num_computed_tokens
        assert snapshots is not None, "only recurrent layers have states"
        if place == seq.snapshot_at:
            prefix = self.block_manager.prefix(seq, place)
            if prefix not in snapshots.slot_of:
                slot = snapshots.new_slot(prefix)
                # Of copies into one slot the last one counts: none is read before all are made.
                earlier = [copy for copy in schedule.state_copies if copy[1] != slot]
                schedule.state_copies = [*earlier, (seq.state_slot, slot)]
            seq.snapshot_at = 0
        return self._until_snapshot(seq, num_new)

    def _comes_soon(self, seq: Sequence) -> bool:
        """Whether a running sequence is about to leave the state after the prefix that this one shares."""
        manager = self.block_manager
        prefix = manager.prefix(seq, seq.snapshot_at)
        if manager.snapshots is None or prefix in manager.snapshots.slot_of:
            return False
        return any(
            s.snapshot_at == seq.snapshot_at
            and s.num_computed_tokens <= s.snapshot_at
            and manager.prefix(s, s.snapshot_at) == prefix
            for s in self.running
        )

    def preempt_after_failure(self) -> None:
        """Has the sequences admitted anew that a failed step has admitted. Pages that they copy may be overwritten, and
        pages that they share with a sequence of the same step are not written, and never will be if that one leaves.
        With recurrent layers all are computed anew: some layers' states may be a step ahead."""
        has_states = self.block_manager.snapshots is not None
        self._free_read_slots()
        for child in [child for state in self.parent_states for child in state.children]:
            self._detach(child)
        while self.running:
            seq = self.running[-1]
            if seq.num_computed_tokens > seq.num_cached_tokens and not has_states:
                return  # a step of it was launched, and of all before it
            self._preempt(self.running.pop())

    def _free_slot(self, seq: Sequence) -> None:
        self.free_slots.append(seq.state_slot)
        seq.state_slot = -1

    @staticmethod
    def _chunk(seq: Sequence, num_new: int) -> Chunk:
        return Chunk(seq, seq.num_computed_tokens, seq.num_computed_tokens + num_new)


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
    if block_manager.snapshots is not None:
        _note_snapshots(order, shared, block_manager)
    ordered: list[Sequence] = []
    followers: list[Sequence] = []
    for seq in sorted(order, key=places.__getitem__):
        if places[seq][-1] in leaders:
            ordered += [seq, *followers]
            followers = []
        else:
            followers.append(seq)
    return ordered + followers


def _note_snapshots(sequences: list[Sequence], shared: Set[bytes], block_manager: BlockManager) -> None:
    """Sets `snapshot_at` of sequences with shared pages, whose hashes are given: to the end of the last such page, and
    of the tokens after it that all sequences with this page have."""
    size = block_manager.block_size
    last: dict[Sequence, bytes] = {}
    hashes_of = {seq: block_manager.page_hashes(seq) for seq in sequences}
    for seq, hashes in hashes_of.items():
        common = max((i + 1 for i, digest in enumerate(hashes) if digest in shared), default=0)
        seq.snapshot_at = common * size
        if common:
            last[seq] = hashes[common - 1]
    ends, more = {*last.values()}, dict[bytes, list[int]]()
    for seq, hashes in hashes_of.items():
        for i, digest in enumerate(hashes):
            if digest in ends:
                rest = seq.token_ids[(i + 1) * size : min((i + 2) * size, seq.first_wanted_position)]
                more[digest] = rest[: common_run(rest, more.get(digest, rest))]
    for seq, digest in last.items():
        seq.snapshot_at += len(more[digest])
