"""Recurrent hybrids: where a chunk ends, a sequence is preempted or a prefix is found again changes no bit.

`make test` tries some offsets, its slow tests every one from 0 to 130. Each comparison has a control: a fault that it
must find. Then random engines, prompts and endings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from evalengine import LLM, SamplingParams
from evalengine.engine.load.loader import Checkpoint, load_model
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.engine.schedule.drafts import SIBLING
from evalengine.engine.states import NUM_SNAPSHOTS
from evalengine.engine.stats import EngineStats
from evalengine.kernels import exact_recurrent
from evalengine.kernels.recurrent_variant import ShortConv
from evalengine.layers import create_ops
from evalengine.layers.cuda import CudaOps
from evalengine.layers.exact import ExactOps
from evalengine.layers.recurrent import States
from evalengine.models.decoder import DecoderForCausalLM
from tests.engine.test_schedule_invariance import differing
from tests.fuzz.cases import Case, cases
from tests.parity.families import FALCON, VOCAB, random_model
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer

LAST = 130
OFFSETS = {
    "some": [0, 1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 127, 128, 129, LAST],
    "all": [*range(LAST + 1)],
}
EVERY = pytest.mark.parametrize("offsets", ["some", pytest.param("all", marks=pytest.mark.slow)])
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": (
        "qwen3_5_text",
        {
            **SIZES,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "scan": (
        "falcon_h1",
        {**FALCON, **SIZES, "num_hidden_layers": 1, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16,
         "mamba_d_state": 8},
    ),
    "convolution": ("lfm2", {**SIZES, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    random_model(*MODELS[request.param], folder)
    return without_tokenizer(folder)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> DecoderForCausalLM:
    loaded = load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 160)
    assert isinstance(loaded, DecoderForCausalLM)
    return loaded


def prompt(number: int, tokens: int) -> list[int]:
    """One that begins as no other one does, up to 150 of them."""
    return [3 + (number if j == 0 else 7 * number + 11 * j + j * j) % (VOCAB - 3) for j in range(tokens)]


def wrong_borders(model: DecoderForCausalLM, offsets: Sequence[int], broken: int | None = None) -> list[int]:
    """At which offsets a prompt whose chunk ends there, with a decode step after it, has other bytes than the whole
    prompt. broken: before the decode step of this one, the sequence's states are set to zero."""
    ids = prompt(1, LAST + 4)
    whole = PagedRunner(model).step({"whole": ids})["whole"]
    runner = PagedRunner(model, num_blocks=10 * len(offsets), most_sequences=len(offsets))
    parts: dict[str, list[torch.Tensor]] = {str(k): [] for k in offsets}
    for number in range(3):
        cuts = {str(k): ids[:k] if number == 0 else ids[k : k + 1] if number == 1 else ids[k + 1 :] for k in offsets}
        if number == 1 and broken is not None:
            caches = (getattr(cache, "states", cache) for cache in runner.caches)
            for pool in (pool for s in caches if isinstance(s, States) for pool in (s.conv, *s.recurrent)):
                pool[runner.slot_of(str(broken))] = 0
        for name, logits in runner.step({name: part for name, part in cuts.items() if part}).items():
            parts[name].append(logits)
    return [k for k in offsets if not torch.equal(torch.cat(parts[str(k)]), whole)]


@EVERY
def test_a_chunk_may_end_anywhere(model: DecoderForCausalLM, offsets: str) -> None:
    assert wrong_borders(model, OFFSETS[offsets]) == []


def test_a_lost_state_is_seen(model: DecoderForCausalLM) -> None:
    """The control."""
    assert wrong_borders(model, OFFSETS["some"], broken=64) == [64]


def run(
    checkpoint: Checkpoint,
    requests: list[Request],
    *,
    preempt: bool = False,
    fill: float = float("nan"),
    **settings: Any,
) -> tuple[dict[int, RequestOutput], int]:
    """The outputs, and how many tokens were found in the cache. preempt: every sequence is, once, when its prompt is
    computed."""
    with LLM(checkpoint, batch_invariant=True, max_model_len=160, max_num_batched_tokens=4096, **settings) as llm:
        assert llm.runner is not None and llm.scheduler is not None
        llm.runner.fill_pool(fill)
        scheduler, done = llm.scheduler, set()

        def more() -> list[Request]:
            for seq in [*scheduler.running] if preempt else []:
                if seq.num_computed_tokens >= seq.num_prompt_tokens and seq.seq_id not in done:
                    done.add(seq.seq_id)
                    scheduler.running.remove(seq)
                    scheduler._preempt(seq)
            return []

        outputs = {output.request_id: output for output in llm.run(requests, more=more)}
        assert llm.stats.num_preemptions == (len(requests) if preempt else 0)
        return outputs, llm.stats.num_cached_tokens


def generation(number: int, ids: list[int]) -> GenerateRequest:
    return GenerateRequest(number, ids, SamplingParams(max_tokens=4, ignore_eos=True))


def preempted(checkpoint: Checkpoint, offsets: Sequence[int], plant: Callable[[], None] | None = None) -> list[int]:
    """At which offsets a preempted sequence has another output; there is no preemption before the first token. plant:
    brings a fault into the run with preemptions, whose pools begin with zeros."""
    requests: list[Request] = [generation(k, prompt(k, k)) for k in offsets if k]
    settings = {"block_size": 16, "num_kv_blocks": 10 * len(requests), "max_num_seqs": len(requests)}
    expected, _ = run(checkpoint, requests, **settings)
    if plant is not None:
        plant()
    fill = float("nan") if plant is None else 0.0
    outputs, _ = run(checkpoint, requests, preempt=True, fill=fill, **settings)
    return sorted(differing(outputs, expected))


@EVERY
def test_a_sequence_may_be_preempted_anywhere(checkpoint: Checkpoint, offsets: str) -> None:
    assert preempted(checkpoint, OFFSETS[offsets]) == []


def test_a_state_that_is_not_reset_is_seen(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a preempted sequence goes on with what its slot holds."""
    name = "causal_conv" if isinstance(checkpoint.spec.recurrent_kinds[0], ShortConv) else "initial_states"
    function = getattr(exact_recurrent, name)
    place = 2 if name == "initial_states" else 5  # of the sequences' tokens so far among the arguments

    def kept(*arguments: Any, **more: Any) -> Any:
        """Of every sequence it is said that one more token came before."""
        totals = [n + 1 for n in arguments[place]]
        return function(*arguments[:place], totals, *arguments[place + 1 :], **more)

    wrong = preempted(checkpoint, OFFSETS["some"], lambda: monkeypatch.setattr(exact_recurrent, name, kept))
    # What a state keeps of far tokens may be nothing. The first row of a ring is written after it has wrapped around.
    assert wrong[:5] == ([16, 17, 63, 64, 65] if name == "causal_conv" else [1, 2, 3, 4, 5])


def found_again(checkpoint: Checkpoint, offsets: Sequence[int]) -> tuple[list[int], int]:
    """At which offsets one of two sequences that have so many tokens in common has another output than without a prefix
    cache; and how many tokens were found there."""
    requests: list[Request] = []
    for k in offsets:
        common = prompt(k, k)
        requests += [generation(k, [*common, 3, 4]), generation(1000 + k, [*common, 5])]
    settings = {"block_size": 1, "num_kv_blocks": 3000, "max_num_seqs": NUM_SNAPSHOTS}
    expected, _ = run(checkpoint, requests, enable_prefix_caching=False, **settings)
    outputs, cached = run(checkpoint, requests, **settings)
    return sorted({number % 1000 for number in differing(outputs, expected)}), cached


@EVERY
def test_a_prefix_may_end_anywhere(checkpoint: Checkpoint, offsets: str) -> None:
    assert found_again(checkpoint, OFFSETS[offsets]) == ([], sum(OFFSETS[offsets]))


def test_a_copy_of_a_later_state_is_seen(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: copies for followers are made a step late."""
    from evalengine.engine.execute.model_runner import ModelRunner

    copy, launch, late = ModelRunner.copy_states, ModelRunner.launch, []

    def later(self: ModelRunner, copies: list[tuple[int, int]]) -> None:
        late.extend((source, to) for source, to in copies if to >= NUM_SNAPSHOTS)
        copy(self, [(source, to) for source, to in copies if to < NUM_SNAPSHOTS])

    def step(self: ModelRunner, schedule: Any) -> Any:
        launched = launch(self, schedule)
        copy(self, late)
        late.clear()
        return launched

    monkeypatch.setattr(ModelRunner, "copy_states", later)
    monkeypatch.setattr(ModelRunner, "launch", step)
    assert found_again(checkpoint, OFFSETS["some"])[0]


# -- guesses -----------------------------------------------------------------------------------------------------------


ENGINE = "evalengine.engine"


class InChunks(ExactOps):
    """`exact`, with the kernels of `native` for convolutions and recurrences."""

    chunked = True
    causal_conv, gated_delta, mamba2 = CudaOps.causal_conv, CudaOps.gated_delta, CudaOps.mamba2


@contextmanager
def kernels_in_chunks() -> Iterator[None]:
    """On a CPU, engines compute recurrences by the kernels of `native`."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(f"{ENGINE}.loaded_model.create_ops", lambda level, dtype, device, *_: InChunks(dtype, device))
            for module in ("settings", "execute.memory"):
                patch.setattr(f"{ENGINE}.{module}.in_chunks", lambda level, device: True)
        yield


def guessed(checkpoint: Checkpoint, answers: list[list[int]], length: float = 2.0) -> tuple[RequestOutput, EngineStats]:
    """The output for 60 tokens, which ends in the next chunk, with these answers as guesses, or without any.
    length: tokens that guesses have given per step, which decides how many are made at once."""
    tokens = 20 if isinstance(checkpoint.spec.recurrent_kinds[0], ShortConv) else 10
    request = GenerateRequest(0, prompt(3, 60), SamplingParams(max_tokens=tokens, ignore_eos=True))
    speculation = "always" if answers else "off"
    with kernels_in_chunks(), LLM(checkpoint, batch_invariant=True, max_model_len=96, speculation=speculation) as llm:
        assert llm.runner is not None and llm.scheduler is not None
        llm.runner.fill_pool(float("nan"))
        if drafter := llm.scheduler.drafter:
            drafter.gains[SIBLING].tokens = length
            llm.learn_answers([(request.prompt_ids, answer) for answer in answers])
        (output,) = llm.run([request])
        return output, llm.stats


@pytest.fixture(scope="module")
def unguessed(checkpoint: Checkpoint) -> RequestOutput:
    return guessed(checkpoint, [])[0]


def wrong_after(output: RequestOutput, count: int) -> list[int]:
    """An answer that agrees with the output in its first `count` tokens only."""
    return [token if i < count else (token + 1) % VOCAB for i, token in enumerate([*output.token_ids, *range(16)])]


def test_guesses_near_a_chunk_boundary_change_nothing(checkpoint: Checkpoint, unguessed: RequestOutput) -> None:
    """Right and wrong ones, on both sides of it."""
    output, stats = guessed(checkpoint, [wrong_after(unguessed, n) for n in (2, 7, 10)])
    assert 2 < stats.num_right_guesses < stats.num_guesses
    assert not differing({0: output}, {0: unguessed})


def test_too_many_guesses_are_found(
    checkpoint: Checkpoint, unguessed: RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse: wrong guesses close a chunk, or overwrite inputs that are still needed."""
    monkeypatch.setattr(f"{ENGINE}.schedule.scheduler.most_guesses", lambda *_: 15)
    assert differing({0: guessed(checkpoint, [wrong_after(unguessed, 2)], length=7.0)[0]}, {0: unguessed})


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "control"])
def test_choices_begin_in_an_open_chunk(checkpoint: Checkpoint, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an empty, a partial and a full chunk; the control copies no state."""
    lengths = (1, 35, 63, 64, 65) if copied else (35, 64)
    requests: list[Request] = []
    for number, tokens in enumerate(lengths):
        requests += [ScoreRequest(3 * number + n, prompt(number, tokens), prompt(n, 3)) for n in range(3)]
    settings = {"max_model_len": 160, "block_size": 16, "num_kv_blocks": 200}
    with kernels_in_chunks():
        with LLM(checkpoint, batch_invariant=True, **settings) as llm:
            expected = {r.request_id: next(iter(llm.run([r]))) for r in requests}
        if not copied:
            monkeypatch.setattr(f"{ENGINE}.execute.rank_runner.RankRunner.copy_states", lambda *_: None)
        with LLM(checkpoint, batch_invariant=True, **settings) as llm:
            assert llm.runner is not None
            llm.runner.fill_pool(float("nan"))
            outputs = {output.request_id: output for output in llm.run(requests)}
            assert llm.stats.num_computed_tokens == sum(tokens + 3 * 2 for tokens in lengths)
    assert bool(differing(outputs, expected)) is not copied


# -- random engines and requests ---------------------------------------------------------------------------------------


def random_requests(case: Case, longest: int) -> Iterator[Request]:
    base = [case.randrange(3, VOCAB) for _ in range(longest)]
    contexts: list[list[int]] = []
    for number in range(case.randrange(3, 10)):
        cut = case.randrange(longest) if case.random() < 0.7 else case.choice([1, 8, 16, 17, 32])
        ids = [*base[:cut], *(case.randrange(3, VOCAB) for _ in range(case.choice([0, 1, 1, 2, 9])))] or [5]
        if case.random() < 0.5:
            params = SamplingParams(
                max_tokens=case.choice([1, 7, 20, 29]),
                temperature=case.choice([0.0, 0.9]),
                ignore_eos=case.random() < 0.7,
            )
            yield GenerateRequest(number, ids, params)
        else:
            context = case.choice(contexts) if contexts and case.random() < 0.5 else ids
            tokens = [case.randrange(3, VOCAB) for _ in range(case.choice([1, 2, 5, 30]))]
            yield ScoreRequest(number, context, tokens)
        contexts.append(ids)


def random_engine(case: Case, longest: int) -> dict[str, Any]:
    block_size = case.choice([1, 3, 4, 8, 16, 16, 64])
    spare = case.randrange(1, 4 + 20 // block_size) if case.random() < 0.6 else 800 // block_size
    return {
        "block_size": block_size,
        "num_kv_blocks": -(-(longest + 40) // block_size) + spare,
        "max_num_seqs": case.choice([1, 3, 8, 8, 8]),
        "max_num_batched_tokens": case.choice([1, 5, 13, 32, 64, 512]),
        "speculation": case.choice(["off", "always"]),  # which resolves to off where states cannot drop guesses
    }


def some_of(llm: LLM, requests: list[Request], case: Case) -> dict[int, RequestOutput]:
    """The outputs of the requests, some of which come late, and some of which are dropped."""
    assert llm.scheduler is not None
    scheduler, late = llm.scheduler, [r for r in requests[1:] if case.random() < 0.3]
    first, dropped = [r for r in requests if r not in late], {r.request_id for r in requests if case.random() < 0.2}

    def more() -> list[Request]:
        if case.random() < 0.15:
            scheduler.drop({number for number in dropped if case.random() < 0.6})
        return [late.pop()] if late and case.random() < 0.3 else []

    outputs = {output.request_id: output for output in llm.run(first, more=more)}
    assert {r.request_id for r in requests} - dropped - {r.request_id for r in late} <= outputs.keys()
    return outputs


def test_random_requests_have_the_bytes_that_each_has_alone(checkpoint: Checkpoint) -> None:
    alone = LLM(
        checkpoint, block_size=64, num_kv_blocks=16, max_num_seqs=1, enable_prefix_caching=False, max_model_len=170
    )
    with alone:
        for case in cases(f"recurrent/{checkpoint.spec.architecture}", 3):
            longest = 40 if case.random() < 0.7 else LAST
            requests, settings = [*random_requests(case, longest)], random_engine(case, longest)
            with case.named(settings), LLM(checkpoint, max_model_len=170, **settings) as llm:
                assert llm.runner is not None and llm.scheduler is not None and llm.block_manager is not None
                llm.runner.fill_pool(float("nan"))
                llm.runner.is_asynchronous = case.random() < 0.6
                expected = {r.request_id: next(iter(alone.run([r]))) for r in requests}
                for _ in range(2):
                    case.shuffle(requests)
                    outputs = some_of(llm, requests, case)
                    assert not differing(outputs, {number: expected[number] for number in outputs})
                    llm.block_manager.check([])
                    assert sorted(llm.scheduler.free_slots) == [*range(settings["max_num_seqs"])]
                    snapshots = llm.block_manager.snapshots
                    assert snapshots is not None
                    assert len({*snapshots._free, *snapshots.slot_of.values()}) == NUM_SNAPSHOTS
