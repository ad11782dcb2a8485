"""What decodes share is read once, step after step, eagerly and by graphs: with the bytes of each request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine import LLM
from evalengine.certify import axes
from evalengine.certify.cases import Case
from evalengine.certify.proof import alone, batched
from evalengine.certify.schedules import ReferenceWorkload, Skip, Variant
from evalengine.engine import loaded_model
from evalengine.engine.execute import cuda_graphs, sharing
from evalengine.engine.execute.cuda_graphs import DecodeGraphs, _Captured
from evalengine.engine.execute.decode_inputs import DecodeInputs, KnownPages
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.schedule.scheduler import Chunk
from evalengine.engine.schedule.sequence import Generating
from evalengine.layers.exact import ExactOps
from evalengine.layers.metadata import AttentionMetadata
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.engine.certify_double import TINY
from tests.kernels.test_attention_cascade import round_states

pytest.importorskip("triton")
from evalengine.kernels.attention import paged_attention

PREFIX = [(7 * i) % 300 + 3 for i in range(77)]


class Ops(ExactOps):
    """`exact`, whose rows depend on no batch, but for `native`'s attention (here in Triton's interpreter)."""

    capturable = True

    def attention(self, *args: Any) -> Tensor:
        return paged_attention(*args)


class Graph:
    """Stands in for a CUDA graph: computes the captured step again, over the buffers as they are then."""

    def __init__(self, graphs: DecodeGraphs, size: int, metadata: AttentionMetadata) -> None:
        self.step = lambda: graphs._step(size, metadata)
        self.results = self.step()

    def replay(self) -> None:
        for kept, new in zip(self.results, self.step(), strict=True):
            kept.copy_(new)


@pytest.fixture
def make(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """`make_llm` of these ops in float32, with the setting `cascade_attention` as on CUDA."""

    def least_saved(config: Any, settings: Any, spec: Any) -> int | None:
        return sharing.least_saved(config, replace(settings, attention_backend="triton"), spec)

    def captured(self: DecodeGraphs, size: int, metadata: AttentionMetadata) -> _Captured:
        graph: Any = Graph(self, size, metadata)
        return _Captured(graph, metadata, *graph.results)

    monkeypatch.setattr(loaded_model, "create_ops", lambda level, dtype, device, *_: Ops(dtype, device))
    monkeypatch.setattr(loaded_model, "least_saved", least_saved)
    monkeypatch.setattr(DecodeGraphs, "_captured_now", captured)
    return lambda **settings: make_llm(dtype="float32", max_num_seqs=4, **settings)


def requests() -> list[Request]:
    """Six generations on one prefix, two of which share more of it, one on none, and a score among them."""
    tails = [[5], [9, 11, *range(40, 60)], [9, 11, *range(40, 61)], [6, 6], [7, 8], [8]]
    made: list[Request] = [
        GenerateRequest(i, PREFIX + tail, SamplingParams(max_tokens=4 + 2 * i % 5, ignore_eos=True))
        for i, tail in enumerate(tails)
    ]
    made.append(GenerateRequest(6, [3, 4], SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)))
    return [*made, ScoreRequest(7, PREFIX, [4, 5])]


def outputs(llm: LLM) -> dict[int, RequestOutput]:
    return {output.request_id: output for output in llm.run(requests())}


def check_equal(found: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    assert found.keys() == expected.keys()
    for key, output in found.items():
        assert output.token_ids == expected[key].token_ids and output.error is None
        assert_bitwise_equal(output.logprobs, expected[key].logprobs)


def test_reading_once_has_the_bytes_of_each_request_alone(make: Callable[..., LLM]) -> None:
    """Eagerly and by graphs, with prompts, preemptions and rows that move; `off` never does it."""
    with make(cascade_attention="off", enforce_eager=True, enable_prefix_caching=False) as llm:
        expected = {request.request_id: next(iter(llm.run([request]))) for request in requests()}
        assert llm.stats.num_cascade_steps == 0
    few_pages = {"num_kv_blocks": 8, "max_model_len": 120}
    for settings in ({"enforce_eager": True}, *([{}] if torch.cuda.is_available() else []), few_pages):
        with make(cascade_attention="always", **settings) as llm:
            check_equal(outputs(llm), expected)
            assert llm.stats.num_cascade_steps > 2
            graphs = llm.runner.graphs if llm.runner is not None else None
            if graphs is not None:
                assert any(cascade for *_, cascade in graphs._captured), "no graph that reads once was captured"
            assert (llm.stats.num_preemptions > 0) == ("num_kv_blocks" in settings)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fault_in_the_shared_part_is_seen(
    eager: bool, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states rounded to half precision the same comparison finds other bytes, so it can fail."""
    with make(cascade_attention="off", enforce_eager=eager) as llm:
        expected = outputs(llm)
    round_states(monkeypatch)
    with make(cascade_attention="always", enforce_eager=eager) as llm:
        found = outputs(llm)
        assert llm.stats.num_cascade_steps > 2
    assert any(
        found[i].token_ids != expected[i].token_ids or count_differing(found[i].logprobs, expected[i].logprobs)
        for i in range(6)
    )
    assert_bitwise_equal(found[6].logprobs, expected[6].logprobs)  # it shares nothing


@pytest.mark.slow  # a quarter of a minute in the interpreter
def test_auto_reads_once_only_where_that_saves_enough(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(cascade_attention="auto", enforce_eager=True) as llm:
        expected = outputs(llm)
        assert llm.stats.num_cascade_steps == 0
    monkeypatch.setattr(sharing, "WORTHWHILE", 100 * 2 * 2 * 32 * 4)  # 100 tokens of two heads of 32 float32 numbers
    monkeypatch.setattr(cuda_graphs, "CASCADE_AFTER", 2)
    for eager in (True, False):
        with make(cascade_attention="auto", enforce_eager=eager) as llm:
            check_equal(outputs(llm), expected)
            assert 0 < llm.stats.num_cascade_steps < llm.stats.num_steps


@pytest.mark.slow
def test_the_axis_of_verify_runs_it_and_sees_a_fault(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every schedule of the axis does what it says, with the bytes of each request alone; a planted fault shows."""
    generation = GenerateRequest(0, PREFIX, SamplingParams(max_tokens=4, ignore_eos=True))
    cases = [Case(0, generation), Case(1, GenerateRequest(1, [3, 4], SamplingParams(max_tokens=2)))]

    def differing(variant: Any) -> int:
        answers = batched(llm, variant)
        assert len(answers) == 5 * variant.passes and variant.happened(llm.stats), variant.label
        return sum(count_differing(answer.logprobs, reference[case.key].logprobs) for case, answer in answers)

    with make() as llm:
        reference = alone(llm, cases)
        work = ReferenceWorkload(cases, reference, TINY, 512, 1000, "cpu", has_cascade=True)
        variants = [variant for variant in axes.cascade(work) if isinstance(variant, Variant)]
        assert len(variants) == 3 and not any(map(differing, variants))
        round_states(monkeypatch)
        assert [differing(variant) > 0 for variant in variants] == [False, True, True]
    (skip,) = axes.cascade(replace(work, cases=cases[1:]))
    assert isinstance(skip, Skip)


# -- one step's part of it ---------------------------------------------------------------------------------------------


def decoding(tokens: int, pages: list[int]) -> Chunk:
    """A chunk that decodes the last of `tokens` tokens, whose KV lies in `pages`."""
    seq = Generating(list(range(tokens)), request=GenerateRequest(0, [1]), max_output_tokens=9, stop_ids=frozenset())
    seq.block_tables = [pages]
    return Chunk(seq, tokens - 1, tokens)


def grown(chunk: Chunk, tokens: int) -> Chunk:
    """The same sequence, so many tokens later."""
    chunk.seq.token_ids.extend([7] * tokens)
    chunk.seq.block_tables[0].extend(
        range(1000 + 100 * chunk.seq.seq_id, 1000 + 100 * chunk.seq.seq_id + -(-tokens // 64))
    )
    return Chunk(chunk.seq, chunk.end + tokens - 1, chunk.end + tokens)


def test_what_is_shared_is_looked_for_anew_when_rows_change_or_a_chunk_is_passed() -> None:
    own = sharing.Sharing(64, 1)
    a, b, c = decoding(70, [1, 2]), decoding(75, [1, 3]), decoding(80, [4, 5])
    first = own.of([a, b, c])
    assert first is not None and first.saved == 64 and first.tokens.tolist() == [[64], [64], [0]]
    prompt = Chunk(c.seq, 0, 60)
    assert own.of([grown(a, 64), b, c, prompt]) is first
    later = own.of([c, a, b])
    assert later is not None and later.tokens.tolist() == [[0], [64], [64]]
    assert own.of([a, c]) is None and own.of([a]) is None
    whole = own.of([a, b])
    assert whole is not None and whole.tokens.shape == (2, 1)
    beyond = own.of([grown(a, 2000), b])
    assert beyond is not None and beyond.tokens.tolist() == [[64, 0, 0], [64, 0, 0]]
    assert sharing.Sharing(64, 65).of([a, b]) is None


def test_a_graphs_inputs_hold_what_is_shared_from_step_to_step() -> None:
    """Units are sent when they change, also after a failed step; a step that needs none leaves them as they are."""
    inputs, known = DecodeInputs(8, 40, 64, torch.device("cpu"), chunks=3), KnownPages(8)
    own = sharing.Sharing(64, 1)
    a, b, c = decoding(70, [1, 2]), decoding(1100, [1, *range(20, 37)]), decoding(1090, [1, *range(20, 36), 6])
    for chunks in ([b, c, a], [b, c, a], [b, c], [c, b, a]):
        shared = own.of(chunks)
        assert shared is not None
        decodes = known.decodes(chunks, shared)
        assert (decodes.shared is None) == (chunks == [b, c, a] and inputs._units[2].item() != 0)
        inputs.fill(decodes)
        blocks = inputs.metadata(4, 2048, cascade=True).shared
        assert blocks is not None and blocks.count.item() == len(shared.tiles) <= blocks.most_tiles
        assert blocks.tiles[: len(shared.tiles)].tolist() == shared.tiles.tolist()
        assert blocks.members[: len(shared.members)].tolist() == shared.members.tolist()
        assert blocks.tokens[: len(chunks), :2].tolist() == shared.tokens.tolist()
    inputs.fill(known.decodes([c, b, a]))
    assert known.decodes([c, b, a], shared).shared is None
    known.forget()
    assert known.decodes([c, b, a], shared).shared is shared
    assert inputs.metadata(4, 2048).shared is None
