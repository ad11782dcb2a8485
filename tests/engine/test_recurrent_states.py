"""Recurrent layers' states: shared at the ends of prefixes, begun with zeros, never behind a wrong guess."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine import LLM, SamplingParams
from evalengine.config.schema import EngineConfig, Numerics
from evalengine.engine.execute.batch import Batch
from evalengine.engine.execute.rank_runner import RankRunner
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.engine.schedule.scheduler import Scheduler
from evalengine.engine.settings import RECURRENT, resolve_speculation
from evalengine.engine.states import independent
from evalengine.engine.stats import EngineStats
from evalengine.errors import ConfigError
from evalengine.explain.trace import explain
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2, Recurrence, ShortConv
from evalengine.models.spec import Block
from evalengine.records.schema import Answer
from tests.engine.test_explain import heard
from tests.engine.test_schedule_invariance import differing, one_by_one
from tests.parity.families import VOCAB, make
from tests.parity.random_models import without_tokenizer

COMMON = [3 + (5 * j + j * j) % (VOCAB - 3) for j in range(45)]
DELTAS = GatedDelta(2, 4, 16, 8, 4)
SCANS = Mamba2(6, 8, 2, 16, 4, True, False, (0.0, None))
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(
    scope="module",  # Falcon-H1 has Granite's Mamba-2, next to attention
    params=["qwen3.5", "lfm2", pytest.param("granite-hybrid", marks=pytest.mark.slow), "falcon-h1"],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    make(request.param, folder)
    return without_tokenizer(folder)


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (7 * number + 11 * j) % (VOCAB - 3) for j in range(tokens)]


def requests() -> list[Request]:
    """Six sequences on one prefix, three of which share more of it; and one of its own."""
    shared = [GenerateRequest(i, COMMON + prompt(0, 9) * (i % 2) + prompt(i, 2 + i), GREEDY) for i in range(6)]
    return [*shared, ScoreRequest(6, COMMON, prompt(6, 4)), GenerateRequest(7, prompt(7, 30), GREEDY)]


def run(checkpoint: Checkpoint, **settings: int) -> tuple[dict[int, RequestOutput], int, int]:
    """The outputs, how many tokens were found in the cache, and how many sequences were preempted."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, **settings) as llm:
        assert llm.runner is not None
        llm.runner.fill_pool(float("nan"))
        outputs = {output.request_id: output for output in llm.run(requests())}
        return outputs, llm.stats.num_cached_tokens, llm.stats.num_preemptions


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[int, RequestOutput]:
    return one_by_one(checkpoint, requests(), batch_invariant=True, max_model_len=96)


@pytest.mark.parametrize(("block_size", "max_num_batched_tokens"), [(1, 64), (4, 13), (16, 64), (16, 7), (44, 200)])
def test_followers_begin_at_the_end_of_their_prefix(
    checkpoint: Checkpoint, expected: dict[int, RequestOutput], block_size: int, max_num_batched_tokens: int
) -> None:
    outputs, cached, _ = run(checkpoint, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens)
    assert not differing(outputs, expected)
    assert cached >= 3 * len(COMMON), "hardly any state was found again"


def test_a_follower_without_its_prefixs_state_is_detected(
    checkpoint: Checkpoint, expected: dict[int, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: no state is copied."""
    monkeypatch.setattr(RankRunner, "copy_states", lambda *_: None)
    assert differing(run(checkpoint, block_size=16)[0], expected)


def test_a_prefix_in_common_ends_anywhere_in_a_page(checkpoint: Checkpoint) -> None:
    """It is computed once."""
    batch: list[Request] = [GenerateRequest(i, COMMON + prompt(i, 9 + i), GREEDY) for i in range(5)]
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16) as llm:
        list(llm.run(batch))
        assert llm.stats.num_cached_tokens == 4 * len(COMMON)


def test_a_preempted_sequence_is_computed_again(checkpoint: Checkpoint, expected: dict[int, RequestOutput]) -> None:
    outputs, _, preempted = run(checkpoint, block_size=8, num_kv_blocks=16)
    assert not differing(outputs, expected) and preempted


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, seed=3)], ids=["greedy", "drawn"])
def test_a_cut_answer_goes_on(checkpoint: Checkpoint, params: SamplingParams) -> None:
    """Its beginning is read as a prompt is, which leaves the states that writing it token by token left."""
    ask = GenerateRequest(0, COMMON, replace(params, max_tokens=12))
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, max_num_batched_tokens=13) as llm:
        (whole,) = llm.run([ask])
        assert len(whole.token_ids) == 12
        for number in (1, 5, 11):
            partial = Answer(whole.token_ids[:number], whole.logprobs[:number], "length", "", False)
            (output,) = llm.run([replace(ask, partial=partial)])
            assert output.token_ids == whole.token_ids
            assert output.logprobs.tobytes() == whole.logprobs.tobytes()


def choices(many: int = 4) -> list[Request]:
    """Six contexts with so many choices each; each context is whole pages of 16 tokens and three more."""
    return [ScoreRequest(many * i + n, prompt(i, 35), prompt(n, 3)) for i in range(6) for n in range(many)]


@pytest.fixture(scope="module")
def chosen(checkpoint: Checkpoint) -> dict[int, RequestOutput]:
    return one_by_one(checkpoint, choices(), batch_invariant=True, max_model_len=96)


def check_slots(scheduler: Scheduler) -> None:
    """Each slot is free, a running sequence's, or a parent's, whose children wait."""
    states = scheduler.parent_states
    used = [*scheduler.free_slots, *(seq.state_slot for seq in scheduler.running), *(state.slot for state in states)]
    assert sorted(used) == [*range(scheduler.max_num_seqs)]
    for state in states:
        assert state.children
        assert all(child.parent_state is state and child in scheduler.waiting for child in state.children)


def choose(
    checkpoint: Checkpoint, *, many: int = 4, between: Callable[[Scheduler], None] = check_slots, **settings: Any
) -> tuple[dict[int, RequestOutput], EngineStats]:
    """The outputs of the choices. between: called between steps."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16, **settings) as llm:
        assert llm.runner is not None and llm.scheduler is not None
        scheduler = llm.scheduler

        def more() -> list[Request]:
            between(scheduler)
            return []

        llm.runner.fill_pool(float("nan"))
        try:
            return {output.request_id: output for output in llm.run(choices(many), more=more)}, llm.stats
        finally:
            check_slots(scheduler)
            assert len(scheduler.free_slots) == scheduler.max_num_seqs


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 30, *(pytest.param(n, marks=pytest.mark.gpu) for n in (3, 9))])
def test_choices_begin_at_the_end_of_their_context(
    checkpoint: Checkpoint, chosen: dict[int, RequestOutput], max_num_seqs: int
) -> None:
    """Each context is computed once, wherever in a page it ends."""
    outputs, stats = choose(checkpoint, max_num_seqs=max_num_seqs)
    assert not differing(outputs, chosen)
    assert stats.num_computed_tokens == 6 * (35 + 4 * 2)


@pytest.mark.parametrize(("max_num_seqs", "steps"), [(3, 36), (8, 18)])
def test_more_choices_than_slots(checkpoint: Checkpoint, max_num_seqs: int, steps: int) -> None:
    """The next contexts do not wait for all of them."""
    expected = one_by_one(checkpoint, choices(10), batch_invariant=True, max_model_len=96)
    outputs, stats = choose(checkpoint, many=10, max_num_seqs=max_num_seqs)
    assert not differing(outputs, expected)
    assert stats.num_computed_tokens == 6 * (35 + 10 * 2) and stats.num_steps <= steps


def test_contexts_whose_last_pages_begin_alike(checkpoint: Checkpoint) -> None:
    """Each choice finds its context's page, not only the newest of those that begin so."""
    batch: list[Request] = [
        ScoreRequest(2 * i + n, COMMON[:8] + prompt(i, 3), prompt(n, 3)) for i in range(40) for n in range(2)
    ]
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16) as llm:
        list(llm.run(batch))
        assert llm.stats.num_computed_tokens == 40 * (11 + 2 * 2)


def test_a_choice_without_its_contexts_state_is_detected(
    checkpoint: Checkpoint, chosen: dict[int, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each looks for it in its own slot."""
    of = Batch.of

    def in_own_slots(*args: Any) -> Batch:
        return replace(batch := of(*args), start_slots=batch.slots)

    monkeypatch.setattr(Batch, "of", in_own_slots)
    assert differing(choose(checkpoint, max_num_seqs=30)[0], chosen)


def test_what_all_choices_have_in_common_is_computed_once(checkpoint: Checkpoint) -> None:
    batch: list[Request] = [
        ScoreRequest(4 * i + n, COMMON[:32] + prompt(i, 19), prompt(n, 3)) for i in range(6) for n in range(4)
    ]
    expected = one_by_one(checkpoint, batch, batch_invariant=True, max_model_len=96)
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16) as llm:
        outputs = {output.request_id: output for output in llm.run(batch)}
        assert llm.stats.num_computed_tokens == 32 + 6 * (19 + 4 * 2)
    assert not differing(outputs, expected)


@pytest.mark.parametrize("num_kv_blocks", [6, 9])
def test_choices_whose_context_was_evicted(
    checkpoint: Checkpoint, chosen: dict[int, RequestOutput], num_kv_blocks: int
) -> None:
    """The state of a context is of no use where its keys and values have been overwritten."""
    outputs, stats = choose(checkpoint, num_kv_blocks=num_kv_blocks, max_num_seqs=9)
    assert not differing(outputs, chosen) and stats.num_computed_tokens >= 6 * (35 + 4 * 2)


@pytest.mark.parametrize("dropped", [{0, 1}, {0, 1, 2, 3}, {5, 6, 7}], ids=str)
def test_dropped_choices_free_their_slots(
    checkpoint: Checkpoint, chosen: dict[int, RequestOutput], dropped: set[int]
) -> None:
    """While their contexts' states wait for them."""
    waited = False

    def between(scheduler: Scheduler) -> None:
        nonlocal waited
        children = [child for state in scheduler.parent_states for child in state.children]
        if any(child.request_ids <= dropped for child in children):
            waited = True
            scheduler.drop(dropped)
        check_slots(scheduler)

    outputs, _ = choose(checkpoint, between=between, max_num_seqs=9)
    assert waited and outputs.keys() >= {*range(24)} - dropped
    assert not differing(outputs, {number: chosen[number] for number in outputs})


def test_a_run_that_ends_early_holds_no_states(checkpoint: Checkpoint) -> None:
    def between(scheduler: Scheduler) -> None:
        if scheduler.parent_states:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        choose(checkpoint, between=between, max_num_seqs=9)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_failed_step_loses_all_states(
    checkpoint: Checkpoint, chosen: dict[int, RequestOutput], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It may have written some layers' states, so that all contexts are computed again."""
    forward, steps = RankRunner.forward, iter(range(1, 1000))

    def failing(self: RankRunner, batch: Batch) -> Tensor:
        if next(steps) == step:
            for pool in self.states:
                pool.fill_(float("nan"))
            raise torch.OutOfMemoryError
        return forward(self, batch)

    monkeypatch.setattr(RankRunner, "forward", failing)
    assert not differing(choose(checkpoint, max_num_seqs=3)[0], chosen)


@pytest.mark.parametrize(
    ("copies", "groups"),
    [
        ([], []),
        ([(0, 1), (0, 2), (3, 4)], [[(0, 1), (0, 2), (3, 4)]]),
        ([(0, 1), (1, 2)], [[(0, 1)], [(1, 2)]]),  # reads a copy
        ([(0, 1), (2, 0)], [[(0, 1)], [(2, 0)]]),  # writes over what was read
        ([(0, 1), (2, 1), (3, 2)], [[(0, 1)], [(2, 1)], [(3, 2)]]),  # writes over a copy
    ],
)
def test_copies_in_order_in_groups(copies: list[tuple[int, int]], groups: list[list[tuple[int, int]]]) -> None:
    assert independent(copies) == groups


def test_another_state_is_seen(checkpoint: Checkpoint, expected: dict[int, RequestOutput]) -> None:
    """The control: copies that hold another sequence's state change what follows."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16) as llm:
        runner = llm.runner
        assert runner is not None
        copy = runner.copy_states
        runner.copy_states = lambda copies: copy([(0 if source >= 256 else source, to) for source, to in copies])
        list(llm.run(requests()[7:]))  # leaves a state in a slot
        outputs = {output.request_id: output for output in llm.run(requests())}
    assert differing(outputs, expected)


def test_an_explanation_follows_each_op_over_schedules(checkpoint: Checkpoint) -> None:
    """Through both branches of a layer and what scales the logits; behind a state that was copied, too."""
    traces = []
    for settings in ({"max_num_batched_tokens": 7, "max_num_seqs": 1}, {"max_num_batched_tokens": 64}):
        with LLM(checkpoint, batch_invariant=True, max_model_len=96, block_size=16, **settings) as llm:
            traces.append(heard(llm, requests(), item=3)[0])
    scaled = {"after_head.0"} if checkpoint.spec.logits_scale != 1.0 else set()
    assert {"logprob", "lm_head"} | scaled <= traces[0].ops.keys() and len(traces[0].ops) > 20
    assert explain(*traces).first is None


def test_the_form_in_chunks_has_a_contract_version_of_its_own(checkpoint: Checkpoint) -> None:
    """Dense models and convolutions have the bits that they had, and the version."""
    in_chunks = not isinstance(checkpoint.spec.recurrent_kinds[0], ShortConv)
    assert checkpoint.spec.contract_version == (4 if in_chunks else 3)
    assert replace(checkpoint.spec, blocks=(Block(),)).contract_version == 3


def test_nothing_is_guessed_where_a_state_is_updated_token_by_token(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot drop a wrong guess; the ring of a convolution can, and states in chunks."""

    def resolved(level: Numerics) -> str:
        return resolve_speculation(EngineConfig(speculation="always"), level, torch.device("cpu"), checkpoint.spec)

    convolution = isinstance(checkpoint.spec.recurrent_kinds[0], ShortConv)
    assert resolved("exact") == resolved("fast") == ("always" if convolution else RECURRENT)
    monkeypatch.setattr("evalengine.engine.settings.kernel_problems", lambda _: [])
    assert resolved("exact") == ("always" if convolution else RECURRENT)
    assert resolved("fast") == resolved("native") == "always"


UNEVEN = [
    (DELTAS, 4, ["2 key heads of the gated delta rule"]),
    (SCANS, 3, ["2 groups of Mamba-2"]),
    (SCANS, 4, ["6 heads of Mamba-2"]),
    (ShortConv(48, 3, False), 5, ["48 channels of the short convolution"]),
    (SCANS, 6, []),
    (replace(SCANS, num_groups=1), 3, []),
]


@pytest.mark.parametrize(("recurrence", "ranks", "uneven"), UNEVEN)
def test_ranks_that_cannot_share_a_recurrence(recurrence: Recurrence, ranks: int, uneven: list[str]) -> None:
    assert recurrence.uneven(ranks) == uneven


def test_they_are_refused_by_name(checkpoint: Checkpoint) -> None:
    (kind,) = checkpoint.spec.recurrent_kinds
    (size, *_) = kind.uneven(5)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size=5: 5 ranks cannot share this model's .*{size}"):
        LLM(checkpoint, batch_invariant=True, max_model_len=96, tensor_parallel_size=5)


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_add_up_are_near(checkpoint: Checkpoint) -> None:
    """`fast` sums over ranks behind a norm whose groups reach over them, and behind one whose do not."""
    results = []
    for ranks in (1, 2):
        with LLM(checkpoint, batch_invariant=False, max_model_len=96, tensor_parallel_size=ranks) as llm:
            results.append({output.request_id: output for output in llm.run(requests()[6:])})
    for one, two in ((results[0][i], results[1][i]) for i in results[0]):
        torch.testing.assert_close(torch.tensor(two.logprobs), torch.tensor(one.logprobs), rtol=0, atol=1e-4)
