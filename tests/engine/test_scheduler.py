"""Scheduler and block manager, driven by a model that only remembers.

A slot of its pool holds the whole prefix whose KV was written there, so every read of a wrong, stale or unwritten slot
is seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalengine.engine.block_manager import BlockManager
from evalengine.engine.request import GenerateRequest, SamplingParams, ScoreRequest
from evalengine.engine.scheduler import Schedule, Scheduler
from evalengine.engine.sequence import Sequence
from evalengine.engine.submission import to_sequences


@dataclass
class RememberingModel:
    """slots[page][offset] is the tuple of all tokens up to and including the one whose KV lies there."""

    num_blocks: int
    block_size: int
    slots: list[list[tuple[int, ...] | None]] = field(init=False)
    computed: int = 0

    def __post_init__(self) -> None:
        self.slots = [[None] * self.block_size for _ in range(self.num_blocks)]

    def execute(self, schedule: Schedule) -> None:
        before = [list(page) for page in self.slots]
        for source, destination in schedule.copies:
            self.slots[destination] = list(before[source])
        for chunk in schedule.chunks:  # all of a step's KV is written before any is read
            for p in range(chunk.start, chunk.end):
                page, offset = chunk.seq.block_table[p // self.block_size], p % self.block_size
                self.slots[page][offset] = tuple(chunk.seq.token_ids[: p + 1])
        for chunk in schedule.chunks:
            self.computed += chunk.end - chunk.start
            for p in range(chunk.end):
                page, offset = chunk.seq.block_table[p // self.block_size], p % self.block_size
                assert self.slots[page][offset] == tuple(chunk.seq.token_ids[: p + 1]), (chunk, p)


def drive(
    sequences: list[Sequence],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    seed: int = 0,
) -> tuple[Scheduler, RememberingModel, dict[int, list[int]]]:
    """Runs everything to its end, checking integrity after every step; returns what each position was asked for."""
    manager = BlockManager(num_blocks, block_size, caching)
    scheduler = Scheduler(manager, max_num_seqs, budget)
    model = RememberingModel(num_blocks, block_size)
    rng = random.Random(seed)
    seen: dict[int, list[int]] = {}
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_work:
        schedule = scheduler.schedule()
        assert 0 < schedule.num_tokens <= budget
        assert len(scheduler.running) <= max_num_seqs
        model.execute(schedule)
        for chunk in schedule.chunks:
            manager.mark_computed(chunk.seq, chunk.start, chunk.end)
        for chunk in schedule.chunks:
            seq = chunk.seq
            for p in seq.wanted_positions(chunk.start, chunk.end):
                seen.setdefault(seq.seq_id, []).append(p)
                if seq.request:
                    seq.append(rng.randrange(3), 0.0, True, {})
                else:
                    for target in seq.targets.pop(p):
                        target.pending.take(target.index, 0.0, True, {}, None)
            done = len(seq.output_ids) == seq.request.params.max_tokens if seq.request else not seq.targets
            if done:
                scheduler.finish(seq)
        manager.check(scheduler.running)
    assert manager.num_free_blocks == num_blocks
    return scheduler, model, seen


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # three tokens: long common prefixes are frequent
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
)
def test_every_read_finds_its_own_prefix(generates, scores, block_size, spare, max_num_seqs, budget, caching, seed):
    requests: list = [GenerateRequest(i, ids, SamplingParams(max_tokens=n)) for i, (ids, n) in enumerate(generates)]
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
    num_blocks = -(-longest // block_size) + spare
    sequences = to_sequences(requests, share_contexts=caching)
    everything = sequences + [child for seq in sequences for child in seq.then]
    wanted = {s.seq_id: sorted(s.targets) for s in everything if not s.request}
    _, _, seen = drive(sequences, num_blocks, block_size, max_num_seqs, budget, caching, seed)
    for seq in everything:
        if seq.request:
            assert len(seen[seq.seq_id]) == seq.request.params.max_tokens
        else:
            assert seen[seq.seq_id] == wanted[seq.seq_id]  # each wanted position once, in order, whatever was cached


def test_choices_compute_their_context_once():
    context = list(range(100))
    choices = [[200], [201], [202, 203, 204], [205, 206]]
    requests = [ScoreRequest(i, context, c) for i, c in enumerate(choices)]
    _, model, _ = drive(to_sequences(requests, True), 100, 16, 8, 1000, True)
    assert model.computed == 100 + 2 + 1  # the context, then what longer choices feed: all but their last token


def test_one_token_choices_cost_one_forward():
    requests = [ScoreRequest(i, [5, 6, 7], [i]) for i in range(4)]
    for caching in (True, False):
        sequences = to_sequences(requests, caching)
        assert len(sequences) == 1 and not sequences[0].then
        _, model, _ = drive(sequences, 10, 4, 8, 100, caching)
        assert model.computed == 3


def test_a_hit_may_end_inside_a_page():
    first = GenerateRequest(0, [0] * 21, SamplingParams(max_tokens=1))
    second = GenerateRequest(1, [0] * 19 + [1] * 4, SamplingParams(max_tokens=1))
    sequences = to_sequences([first, second], True)
    drive(sequences, 10, 8, 1, 100, True)
    assert sequences[1].num_cached_tokens == 19  # two pages of 8, and 3 tokens of the copied third


def test_choices_follow_their_context_while_it_is_in_the_pool():
    """Two contexts of which the pool holds one: the choices of the first come before the second."""
    requests = [ScoreRequest(4 * g + i, [g] * 16, [5, i, i]) for g in range(2) for i in range(3)]
    _, model, _ = drive(to_sequences(requests, True), 6, 4, 1, 100, True)
    assert model.computed == 2 * (16 + 3 * 2)  # each choice feeds two tokens, and both their logits are wanted


def test_a_prefix_outlives_its_tail():
    """Of a finished sequence's pages the last is handed out first."""
    first, other, again = [0] * 16, [1] * 8, [0] * 16
    requests = [GenerateRequest(i, ids, SamplingParams(max_tokens=1)) for i, ids in enumerate([first, other, again])]
    sequences = to_sequences(requests, True)
    drive(sequences, 5, 4, 1, 100, True)
    assert sequences[2].num_cached_tokens == 12


def test_a_prefix_in_the_same_step_is_shared():
    requests = [GenerateRequest(i, [0] * 32 + [i], SamplingParams(max_tokens=1)) for i in range(4)]
    _, model, _ = drive(to_sequences(requests, True), 40, 16, 8, 1000, True)
    assert model.computed == 32 + 4


def test_preemption_happens_and_ends():
    requests = [GenerateRequest(i, [i] * 5, SamplingParams(max_tokens=20)) for i in range(4)]
    scheduler, _, _ = drive(to_sequences(requests, False), 10, 4, 4, 100, False)
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_prefill_chunks_mix_with_decode(caching):
    requests = [
        GenerateRequest(0, [0] * 3, SamplingParams(max_tokens=30)),
        GenerateRequest(1, [1] * 50, SamplingParams(max_tokens=2)),
    ]
    manager = BlockManager(40, 4, caching)
    scheduler = Scheduler(manager, 4, 8)
    for seq in to_sequences(requests, caching):
        scheduler.add(seq)
    mixed = 0
    for _ in range(20):
        schedule = scheduler.schedule()
        sizes = sorted(c.end - c.start for c in schedule.chunks)
        mixed += len(sizes) == 2 and sizes[0] == 1 and sizes[1] > 1
        for chunk in schedule.chunks:
            manager.mark_computed(chunk.seq, chunk.start, chunk.end)
            if chunk.end == chunk.seq.num_tokens:
                chunk.seq.append(7, 0.0, True, {})
    assert mixed >= 5
