"""Scheduler and block manager, driven by a model that remembers what each slot of its pool should hold.

A slot holds the whole prefix whose KV was written there, so that every read of a wrong, stale or unwritten slot is
seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalengine.engine.kv_layout import KVGroup, KVLayout
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.schedule.block_manager import WHOLE, BlockManager
from evalengine.engine.schedule.scheduler import Chunk, Scheduler, SchedulerOutput, in_prefix_order
from evalengine.engine.schedule.scoring import Scoring
from evalengine.engine.schedule.sequence import Generating, Sequence, Status
from evalengine.engine.schedule.snapshots import Snapshots
from evalengine.engine.submission import to_sequences
from evalengine.kernels.recurrent_variant import ShortConv, most_guesses

# One window or several, wider and narrower than pages and chunks, alone and beside layers that see everything.
GROUPS = [
    WHOLE,
    (KVGroup(None, 1), KVGroup(5, 3)),
    (KVGroup(None, 2), KVGroup(20, 1)),
    (KVGroup(1, 1),),
    (KVGroup(4, 2), KVGroup(17, 1)),
]
STOPS = frozenset({2})  # This token ends a generation that does not ignore it.


@dataclass
class RememberingModel:
    """slots[page][offset] is the block table by which KV was written there, and all tokens up to the one it is of."""

    num_blocks: int
    block_size: int
    groups: tuple[KVGroup, ...]
    chosen: dict[int, int] = field(default_factory=dict)  # Sequence id -> its next token, not yet taken.
    slots: list[list[tuple[int, tuple[int, ...]] | None]] = field(init=False)
    computed: int = 0

    def __post_init__(self) -> None:
        num_pages = self.num_blocks * sum(group.num_tables for group in self.groups)
        self.slots = [[None] * self.block_size for _ in range(num_pages)]

    def execute(self, schedule: SchedulerOutput) -> None:
        old_slots = [list(page) for page in self.slots]
        for source, destination in schedule.copies:
            self.slots[destination] = list(old_slots[source])
        for chunk in schedule.chunks:  # All of a step's KV is written before any is read.
            for table, pages in enumerate(chunk.seq.block_tables):
                for p in range(chunk.start, chunk.end):
                    page, offset = pages[p // self.block_size], p % self.block_size
                    self.slots[page][offset] = table, tuple(self.tokens(chunk.seq)[: p + 1])
        for chunk in schedule.chunks:
            self.computed += chunk.end - chunk.start
            self.read(chunk)

    def read(self, chunk: Chunk) -> None:
        """Looks at all that the chunk's queries see, in the layers of each table."""
        windows = [group.window for group in self.groups for _ in range(group.num_tables)]
        for table, (window, pages) in enumerate(zip(windows, chunk.seq.block_tables, strict=True)):
            for p in range(0 if window is None else max(0, chunk.start + 1 - window), chunk.end):
                page, offset = pages[p // self.block_size], p % self.block_size
                wanted = table, tuple(self.tokens(chunk.seq)[: p + 1])
                assert self.slots[page][offset] == wanted, (chunk, table, p)

    def tokens(self, seq: Sequence) -> list[int]:
        chosen = self.chosen.get(seq.seq_id)
        return seq.token_ids if chosen is None else [*seq.token_ids, chosen]


def as_sequences(requests: list[Request], share_contexts: bool) -> list[Sequence]:
    """The requests as the engine's sequences; scores that share a context share a sequence if `share_contexts`."""

    def generating(request: GenerateRequest) -> Generating:
        most, ends = request.params.max_tokens, frozenset() if request.params.ignore_eos else STOPS
        return Generating(list(request.prompt_ids), request=request, max_output_tokens=most, stop_ids=ends)

    return to_sequences(requests, share_contexts, generating)


@dataclass
class Driver:
    """Runs sequences to their end, checking integrity after every step.

    With `ahead`, a step's results are taken once the next step is launched, wherever the scheduler offers one.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    caching: bool
    seed: int = 0
    ahead: bool = False
    groups: tuple[KVGroup, ...] = WHOLE
    recurrent: bool = False
    seen: dict[int, list[int]] = field(default_factory=dict)  # Sequence id -> positions whose logits were asked for.
    num_ahead: int = 0

    def __post_init__(self) -> None:
        num_slots = self.max_num_seqs + 2
        snapshots = Snapshots(range(self.max_num_seqs, num_slots)) if self.recurrent else None
        self.manager = BlockManager(self.num_blocks, self.block_size, self.caching, self.groups, self.budget, snapshots)
        kinds = [ShortConv(4, 3, False)] if self.recurrent else []
        self.scheduler = Scheduler(self.manager, self.max_num_seqs, self.budget, recurrences=kinds)
        self.states: list[list[int] | None] = [None] * num_slots  # the tokens that each slot's state has seen
        self.model = RememberingModel(self.num_blocks, self.block_size, self.groups)
        self._rng = random.Random(self.seed)
        self._in_flight: list[tuple[Sequence, range, int]] = []
        self._unread: list[Chunk] = []  # of the step in flight
        self.most_pages = 0
        self.num_elsewhere = 0  # sequences that began with the state in a parent's slot

    def run(self, sequences: list[Sequence]) -> Driver:
        for seq in sequences:
            self.scheduler.add(seq)
        while self.scheduler.has_work:
            self.step()
        assert self.manager.num_free_blocks == self.num_blocks
        return self

    def step(self) -> None:
        schedule = self.scheduler.schedule_ahead() if self._in_flight else None
        self.num_ahead += schedule is not None
        if schedule is None:
            self.take()
            if not self.scheduler.has_work:
                return
            schedule = self.scheduler.schedule()
        assert 0 < schedule.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        self.model.execute(schedule)
        if self.recurrent:
            self.follow_states(schedule)
        launched = []
        for chunk in schedule.chunks:
            positions = chunk.seq.wanted(chunk.start, chunk.end)
            if positions:
                launched.append((chunk.seq, positions, self._rng.randrange(3)))
            self.scheduler.launched(chunk)
        self.take()
        self._in_flight, self._unread = launched, schedule.chunks
        self.most_pages = max(self.most_pages, len(self.model.slots) - self.manager.num_free_pages)
        self.model.chosen = {seq.seq_id: token for seq, _, token in launched if isinstance(seq, Generating)}
        if not self.ahead:
            self.take()
        self.manager.check(self.scheduler.sequences)

    def follow_states(self, schedule: SchedulerOutput) -> None:
        """Each chunk must find the state after the tokens before it."""
        for source, destination in schedule.state_copies:
            self.states[destination] = self.states[source]
        starts = {c.seq.start_slot: c.start for c in schedule.chunks if c.seq.start_slot != c.seq.state_slot}
        for seq, start, end, *_ in schedule.chunks:
            self.num_elsewhere += seq.start_slot != seq.state_slot
            if seq.state_slot in starts:  # it may only add rows behind those that others read
                assert seq.start_slot == seq.state_slot and start == starts[seq.start_slot]
                assert all(end - start - 1 <= most_guesses(kind, start) for kind in self.scheduler.recurrences)
        for seq, start, end, *_ in schedule.chunks:
            ids = self.model.tokens(seq)
            assert start == 0 or self.states[seq.start_slot] == ids[:start]
            self.states[seq.state_slot] = ids[:end] if seq.start_slot == seq.state_slot else None
        parents = self.scheduler.parent_states
        slots = [
            *self.scheduler.free_slots,
            *self.scheduler.freed_slots,
            *(seq.state_slot for seq in self.scheduler.running),
        ]
        assert sorted([*slots, *(parent.slot for parent in parents)]) == [*range(self.max_num_seqs)]

    def take(self) -> None:
        """Takes the results of the step in flight, if there is one, and finishes the sequences that they complete.
        What it read is still there: a step whose results are not finite is computed again."""
        results, self._in_flight, self.model.chosen = self._in_flight, [], {}
        for chunk in self._unread:
            if chunk.seq.status is not Status.FINISHED:
                self.model.read(chunk)
        self._unread = []
        for seq, positions, token in results:
            if seq.status is Status.FINISHED:
                continue
            self.seen.setdefault(seq.seq_id, []).extend(positions)
            if isinstance(seq, Generating):
                seq.append(token, 0.0, True, {})
                is_complete = seq.is_complete()
            elif isinstance(seq, Scoring):
                columns = seq.columns(positions)
                seq.take(positions, columns[:1], np.zeros(len(columns), dtype=np.float32), [], None)
                is_complete = seq.is_complete()
            if is_complete:
                self.scheduler.finish(seq)


def drive(sequences: list[Sequence], *settings: Any, **options: Any) -> tuple[Scheduler, RememberingModel]:
    """Runs the sequences by a new `Driver`, and returns its scheduler and its model."""
    driver = Driver(*settings, **options).run(sequences)
    return driver.scheduler, driver.model


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # Few tokens, for many common prefixes.
generate = st.builds(lambda ids, n: (ids, n), tokens, st.integers(1, 20))
score = st.builds(lambda a, b: (a, b), tokens, st.lists(tokens, min_size=1, max_size=4))


@settings(max_examples=300, deadline=None)
@given(
    generates=st.lists(generate, max_size=8),
    scores=st.lists(score, max_size=4),
    block_size=st.sampled_from([1, 2, 3, 16]),
    spare=st.integers(0, 30),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 70),
    caching=st.booleans(),
    seed=st.integers(0, 5),
    ahead=st.booleans(),
    stop=st.booleans(),
    groups=st.sampled_from(GROUPS),
    recurrent=st.booleans(),
)
def test_every_read_finds_its_own_prefix(
    generates, scores, block_size, spare, max_num_seqs, budget, caching, seed, ahead, stop, groups, recurrent
):
    """Over random requests, pools and limits, each read finds its own prefix, and each wanted position comes once."""
    requests: list = [
        GenerateRequest(i, ids, SamplingParams(max_tokens=n, ignore_eos=not stop))
        for i, (ids, n) in enumerate(generates)
    ]
    for context, continuations in scores:
        requests += [ScoreRequest(len(requests) + i, context, c) for i, c in enumerate(continuations)]
    longest = max(
        (
            len(r.prompt_ids) + r.params.max_tokens
            if isinstance(r, GenerateRequest)
            else len(r.context_ids) + len(r.continuation_ids)
            for r in requests
        ),
        default=1,
    )
    num_blocks = KVLayout(1, groups, ()).blocks_for(longest, block_size, budget) + spare
    sequences = as_sequences(requests, caching)
    everything = sequences + [child for seq in sequences for child in seq.successors]
    wanted_positions = {s.seq_id: list(s.wanted(0, s.num_tokens)) for s in everything if isinstance(s, Scoring)}
    settings = num_blocks, block_size, max_num_seqs, budget, caching, seed, ahead, groups, recurrent
    driver = Driver(*settings)
    driver.run(in_prefix_order(sequences, driver.manager) if recurrent else sequences)
    for seq in everything:
        if isinstance(seq, Generating):
            ended = seq.token_ids[-1] in seq.stop_ids
            assert ended or len(driver.seen[seq.seq_id]) == seq.request.params.max_tokens
            assert not seq.stop_ids & set(seq.output_ids[:-1])
        else:
            assert driver.seen[seq.seq_id] == wanted_positions[seq.seq_id]  # Each position came once, in order.


def test_a_state_is_released_only_in_a_step_that_is_launched():
    """Of a context that holds the only slot, while its pages are missing for a choice in a step planned ahead."""
    batch = [ScoreRequest(n, [0, 1, 2, 0, 1], [n, 2, 1]) for n in range(2)]
    driver = Driver(2, 4, 1, 100, True, ahead=True, recurrent=True).run(as_sequences(batch, True))
    assert batch[0].context_ids in driver.states[1:], "the context's state became a snapshot"


@pytest.mark.parametrize(
    ("max_num_seqs", "choice", "elsewhere"), [(1, 4, 4), (2, 4, 3), (3, 4, 3), (8, 4, 3), (3, 40, 4), (8, 40, 4)]
)
def test_choices_read_the_state_of_their_context_in_its_slot(max_num_seqs: int, choice: int, elsewhere: int):
    """All but one that takes over the slot, after the others or where it only adds rows there; where there is no other
    slot, in a snapshot's. And none in a step of one token, or behind a chunk that is full."""

    def driver(context: int, choice: int) -> Driver:
        batch = [ScoreRequest(n, [0] * context, [n] * choice) for n in range(4)]
        return Driver(100, 16, max_num_seqs, 400, True, recurrent=True).run(as_sequences(batch, True))

    assert driver(70, choice).num_elsewhere == elsewhere
    assert driver(64, choice).num_elsewhere == driver(70, 2).num_elsewhere == 0


def test_steps_are_scheduled_before_the_last_ones_results_are_taken():
    """Steps go ahead where the pool has pages for all, and compute nothing in vain where requests end by max_tokens."""
    batch = [GenerateRequest(i, [i % 3] * 5, SamplingParams(max_tokens=1 + i % 4, ignore_eos=True)) for i in range(12)]
    waiting = Driver(100, 4, 3, 100, True).run(as_sequences(batch, True))
    ahead = Driver(100, 4, 3, 100, True, ahead=True).run(as_sequences(batch, True))
    assert waiting.num_ahead == 0 and ahead.num_ahead > 0
    assert ahead.model.computed == waiting.model.computed, "nothing was computed in vain"
    assert ahead.seen.keys() and len(ahead.seen) == len(waiting.seen) == 12


def test_choices_compute_their_context_once():
    context = list(range(100))
    choices = [[200], [201], [202, 203, 204], [205, 206]]
    requests = [ScoreRequest(i, context, c) for i, c in enumerate(choices)]
    _, model = drive(as_sequences(requests, True), 100, 16, 8, 1000, True)
    assert model.computed == 100 + 2 + 1  # The context once, then all but the last token of each longer choice.


def test_one_token_choices_cost_one_forward():
    requests = [ScoreRequest(i, [5, 6, 7], [i]) for i in range(4)]
    for caching in (True, False):
        sequences = as_sequences(requests, caching)
        assert len(sequences) == 1 and not sequences[0].successors
        _, model = drive(sequences, 10, 4, 8, 100, caching)
        assert model.computed == 3


def test_a_hit_may_end_inside_a_page():
    first = GenerateRequest(0, [0] * 21, SamplingParams(max_tokens=1))
    second = GenerateRequest(1, [0] * 19 + [1] * 4, SamplingParams(max_tokens=1))
    sequences = as_sequences([first, second], True)
    drive(sequences, 10, 8, 1, 100, True)
    assert sequences[1].num_cached_tokens == 19  # Two pages of 8, and 3 tokens of the third, which is copied.


def test_choices_follow_their_context_while_it_is_in_the_pool():
    """The pool holds one of two contexts: the choices of the first one run before those of the second."""
    requests = [ScoreRequest(4 * g + i, [g] * 16, [5, i, i]) for g in range(2) for i in range(3)]
    _, model = drive(as_sequences(requests, True), 6, 4, 1, 100, True)
    assert model.computed == 2 * (16 + 3 * 2)  # Each choice feeds two tokens, and the logits of both are wanted.


def test_a_prefix_outlives_its_tail():
    """A finished sequence's last page is the first to be handed out again."""
    first, other, same = [0] * 16, [1] * 8, [0] * 16
    requests = [GenerateRequest(i, ids, SamplingParams(max_tokens=1)) for i, ids in enumerate([first, other, same])]
    sequences = as_sequences(requests, True)
    drive(sequences, 5, 4, 1, 100, True)
    assert sequences[2].num_cached_tokens == 12


def test_a_prefix_in_the_same_step_is_shared():
    requests = [GenerateRequest(i, [0] * 32 + [i], SamplingParams(max_tokens=1)) for i in range(4)]
    _, model = drive(as_sequences(requests, True), 40, 16, 8, 1000, True)
    assert model.computed == 32 + 4


def test_preemption_happens_and_ends():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [GenerateRequest(i, [i] * 5, params) for i in range(4)]
    scheduler, _ = drive(as_sequences(requests, False), 10, 4, 4, 100, False)
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_prefill_chunks_mix_with_decode(caching):
    requests = [
        GenerateRequest(0, [0] * 3, SamplingParams(max_tokens=30, ignore_eos=True)),
        GenerateRequest(1, [1] * 50, SamplingParams(max_tokens=2, ignore_eos=True)),
    ]
    manager = BlockManager(40, 4, caching)
    scheduler = Scheduler(manager, 4, 8)
    for seq in as_sequences(requests, caching):
        scheduler.add(seq)
    mixed = 0
    for _ in range(20):
        schedule = scheduler.schedule()
        sizes = sorted(c.end - c.start for c in schedule.chunks)
        mixed += len(sizes) == 2 and sizes[0] == 1 and sizes[1] > 1
        for chunk in schedule.chunks:
            is_end = chunk.end == chunk.seq.num_tokens
            scheduler.launched(chunk)
            if is_end:
                assert isinstance(chunk.seq, Generating)
                chunk.seq.append(7, 0.0, True, {})
    assert mixed >= 5


def test_groups_that_share_pages_are_brought_together_and_begun_a_step_early():
    shared = [[g] * 9 for g in range(3)]
    requests = [GenerateRequest(i, [*shared[i % 3], 10 + i], SamplingParams(max_tokens=1)) for i in range(9)]
    alone = [GenerateRequest(9 + i, [50 + i] * 9, SamplingParams(max_tokens=1)) for i in range(2)]
    manager = BlockManager(100, 4)
    ordered = in_prefix_order(as_sequences([*requests, *alone], True), manager)
    order = [seq.request.request_id for seq in ordered if isinstance(seq, Generating)]
    assert order == [0, 1, 3, 6, 2, 4, 7, 5, 8, 9, 10]
    unshared = as_sequences(alone, True)
    assert in_prefix_order(unshared, manager) == unshared
    sequences = as_sequences(requests, False)
    assert in_prefix_order(sequences, BlockManager(100, 4, enable_prefix_caching=False)) == sequences


@pytest.mark.parametrize(("num_blocks", "budget"), [(1000, 60), (50, 60), (40, 30), (24, 30)])
def test_the_order_of_shared_prefixes_saves_tokens(num_blocks, budget):
    """Questions of ten subjects come in turn; each subject's shared exemplars end in a partly filled page."""
    exemplars = [[100 * g + i for i in range(22)] for g in range(10)]
    params = SamplingParams(max_tokens=1)
    requests = [GenerateRequest(i, [*exemplars[i % 10], 5000 + i, i], params) for i in range(100)]
    computed = []
    for ordered in (False, True):
        driver = Driver(num_blocks, 4, 16, budget, True)
        sequences = as_sequences(requests, True)
        driver.run(in_prefix_order(sequences, driver.manager) if ordered else sequences)
        computed.append(driver.model.computed)
    fewest = 10 * 22 + 100 * 2
    assert fewest <= computed[1] < 1.4 * fewest, "whatever the pool"
    assert computed[0] > 5 * fewest or num_blocks == 1000
