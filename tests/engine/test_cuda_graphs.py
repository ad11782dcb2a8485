"""Decode steps as CUDA graphs give the eager steps' bytes, whatever the batch does from step to step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evalengine.engine.execute.cuda_graphs import LARGEST_BATCH, LENGTH_AT_ONCE, DecodeGraphs, batch_sizes, kv_lengths
from evalengine.engine.execute.decode_inputs import DecodeInputs, KnownPages
from evalengine.engine.execute.read_out import LastTokens
from evalengine.engine.llm import LLM
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.schedule.scheduler import Chunk
from evalengine.engine.schedule.sequence import Generating
from evalengine.layers.metadata import AttentionMetadata
from tests.bitwise import assert_bitwise_equal


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 17, 256, 511, 512, 513, 65_535])
def test_every_batch_has_a_size(most: int) -> None:
    """The batch sizes of graphs rise from 1 to the most sequences, and are at most 32."""
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, LARGEST_BATCH)
    assert len(sizes) <= 32


@pytest.mark.parametrize("longest", [2, 1023, 1024, 1025, 8192, 40_960])
def test_every_length_has_a_length(longest: int) -> None:
    """The KV lengths of graphs rise to the longest one."""
    lengths = kv_lengths(longest)
    assert lengths == sorted(set(lengths)) and lengths[-1] == longest


def decoding(tokens: int, pages: list[int]) -> Chunk:
    """A chunk that decodes the last of `tokens` tokens, whose KV lies in `pages`."""
    ids = list(range(100, 100 + tokens))
    seq = Generating(ids, request=GenerateRequest(0, [1]), max_output_tokens=9, stop_ids=frozenset())
    seq.block_tables = [pages]
    return Chunk(seq, tokens - 1, tokens)


def test_inputs_are_what_an_eager_step_builds() -> None:
    """Over several steps, sequences grow, gain pages, leave, come back with other pages, and change their rows."""
    inputs, known_pages = DecodeInputs(8, 5, 4, torch.device("cpu")), KnownPages(8)
    a, b, c = decoding(4, [7]), decoding(9, [1, 2, 3]), decoding(1, [5])
    grown = Chunk(a.seq, 4, 5)
    moved = decoding(9, [3, 2, 1])
    for chunks, size in (([a, b, c], 4), ([a, b, c], 8), ([b, c], 2), ([grown, moved, c], 3), ([moved], 1)):
        if grown in chunks:
            a.seq.token_ids.append(55)
            a.seq.block_tables[0].append(6)
        inputs.fill(known_pages.decodes(chunks))
        n = len(chunks)
        tables = [chunk.seq.block_tables[0] for chunk in chunks]
        expected = AttentionMetadata.build([1] * n, [chunk.end for chunk in chunks], tables, 4, torch.device("cpu"))
        metadata = inputs.metadata(size, 20)
        assert inputs.ids[:n].tolist() == [chunk.seq.token_ids[chunk.start] for chunk in chunks]
        assert inputs.positions[:n].tolist() == [chunk.start for chunk in chunks]
        assert torch.equal(metadata.slot_mapping[:n], expected.slot_mapping)
        assert torch.equal(metadata.seqlens_k[:n], expected.seqlens_k)
        for row, table in enumerate(tables):
            assert metadata.block_table[row, : len(table)].tolist() == table
        whole = inputs.metadata(8, 20)  # a graph of more rows may be captured over them
        assert (whole.slot_mapping[n:] == -1).all() and (whole.seqlens_k[n:] == 0).all()
        assert metadata.num_decodes == size and metadata.max_decode_kv_len == 20


def test_a_long_requests_positions_are_rows_behind_the_short_ones() -> None:
    """RoPE's rows alone: where its keys and values lie is as for any other."""
    inputs, a, b = DecodeInputs(8, 5, 4, torch.device("cpu")), decoding(4, [7]), decoding(9, [1, 2, 3])
    b.seq.rope_start = 100
    inputs.fill(KnownPages(8, has_rope_starts=True).decodes([a, b]))
    assert inputs.positions[:4].tolist() == [3, 108, 0, 0]
    metadata = inputs.metadata(4, 20)
    assert metadata.slot_mapping.tolist() == [7 * 4 + 3, 3 * 4, -1, -1] and metadata.seqlens_k.tolist() == [4, 9, 0, 0]


def test_each_block_table_has_its_slots() -> None:
    """Layers of two groups write the same tokens to pages of their own."""
    inputs, a, b = DecodeInputs(8, 5, 4, torch.device("cpu"), (0, 1, 0)), decoding(4, [7]), decoding(9, [1, 2, 3])
    a.seq.block_tables, b.seq.block_tables = [[7], [9]], [[1, 2, 3], [4, 5, 6]]
    known = KnownPages(8)
    inputs.fill(known.decodes([a, b]))
    for pages in b.seq.block_tables:
        pages.append(pages[-1] + 4)
    inputs.fill(known.decodes([a, Chunk(b.seq, 8, 9)]))
    metadata = inputs.metadata(2, 20)
    for layer, tables in ((0, [[7], [1, 2, 3, 7]]), (1, [[9], [4, 5, 6, 10]]), (2, [[7], [1, 2, 3, 7]])):
        own = metadata.of_layer(layer)
        assert own.slot_mapping.tolist() == [tables[0][0] * 4 + 3, tables[1][2] * 4]
        for row, pages in enumerate(tables):
            assert own.block_table[row, : len(pages)].tolist() == pages


def test_after_a_step_that_failed_every_row_is_said_again() -> None:
    """After a failed step, `forget` makes the next one write every row's pages again."""
    inputs, known_pages = DecodeInputs(8, 5, 4, torch.device("cpu")), KnownPages(8)
    a, b = decoding(4, [7]), decoding(9, [1, 2, 3])
    assert len(known_pages.decodes([a, b]).changes) == 2  # As in a step that failed, nothing writes these changes.
    assert not known_pages.decodes([a, b]).changes
    known_pages.forget()
    for chunks in ([a, b], [b, a], [b, a]):
        inputs.fill(known_pages.decodes(chunks))
        for row, chunk in enumerate(chunks):
            pages = chunk.seq.block_tables[0]
            assert inputs.metadata(2, 20).block_table[row, : len(pages)].tolist() == pages


def test_a_token_that_is_not_known_yet_comes_from_its_row_of_the_last_step() -> None:
    """A token that the host has not taken yet is fed from its row of the last step; one that is no token is clamped."""
    inputs, last_tokens = DecodeInputs(8, 5, 4, torch.device("cpu")), LastTokens(8, 1024, torch.device("cpu"))
    known_pages = KnownPages(8)
    a, b, c = decoding(4, [7]), decoding(9, [1, 2, 3]), decoding(1, [5])
    inputs.fill(known_pages.decodes([a, b, c]))
    last_tokens.put(torch.tensor([41, 1024, 43]))  # 1024 is no token: b's row was not finite.
    a.seq.device_row, b.seq.device_row, c.seq.device_row = 0, 1, 2
    inputs.fill(known_pages.decodes([Chunk(b.seq, 9, 10), Chunk(c.seq, 1, 2)]))
    assert last_tokens.resolve(inputs.ids[:4]).tolist() == [1023, 43, 0, 0]
    c.seq.token_ids.append(77)
    inputs.fill(known_pages.decodes([Chunk(c.seq, 1, 2)]))
    assert last_tokens.resolve(inputs.ids[:2]).tolist() == [77, 0]


def test_the_largest_graph_is_captured_first_and_no_other_before_it_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is captured when it is met for the second time; before the first one comes that of the largest size."""
    captured: list[int] = []

    def capture(_: DecodeGraphs, size: int, __: AttentionMetadata) -> Any:
        captured.append(size)
        return SimpleNamespace()

    monkeypatch.setattr(DecodeGraphs, "_warm", lambda *_: None)
    monkeypatch.setattr(DecodeGraphs, "_captured_now", capture)
    ops: Any = SimpleNamespace(device=torch.device("cpu"), tp=SimpleNamespace(size=1))
    sizes = {"block_size": 4, "max_num_seqs": 16, "max_model_len": 64}
    graphs = DecodeGraphs(Any, ops, [], LastTokens(16, 1024, ops.device), **sizes)  # type: ignore[arg-type]
    found = []
    for sequences in (3, 3, 3, 2, 2, 1):
        step = graphs.plan([decoding(4, [7])] * sequences)
        found.append(None if step is None else step.capture)
        if step is not None and step.capture:
            assert graphs.capture(step.size, step.kv_len)
    assert found == [None, True, False, None, True, None] and captured == [16, 4, 2]


# -- on a GPU --------------------------------------------------------------------------------------------------------

PROMPTS = [[(7 * i + j * j) % 300 + 3 for j in range(1 + i % 37)] for i in range(40)]
TIGHT = {"num_kv_blocks": 40, "block_size": 16, "max_model_len": 256}  # Such a pool preempts.


def requests(params: SamplingParams) -> list[Request]:
    """Generations of unlike lengths, so that the batch shrinks and its rows move, and scores among them."""
    generations: list[Request] = [
        GenerateRequest(i, prompt, replace(params, max_tokens=3 + i * 5 % 41)) for i, prompt in enumerate(PROMPTS)
    ]
    return [*generations, *(ScoreRequest(100 + i, PROMPTS[i], PROMPTS[i + 1]) for i in range(5))]


def outputs(llm: LLM, params: SamplingParams) -> dict[int, RequestOutput]:
    """The outputs of all requests by id."""
    return {output.request_id: output for output in llm.run(requests(params))}


def check_equal(actual: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    """Asserts that tokens, logprobs and alternatives are equal, and that no request failed."""
    assert actual.keys() == expected.keys()
    for key, output in actual.items():
        assert output.token_ids == expected[key].token_ids and output.error is None
        assert_bitwise_equal(output.logprobs, expected[key].logprobs)
        assert output.top_logprobs == expected[key].top_logprobs


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(ignore_eos=True),
        SamplingParams(ignore_eos=True, temperature=1.0, top_k=50, top_p=0.9, seed=3),
        SamplingParams(ignore_eos=True, logprobs=3),
        SamplingParams(stop=("1", "e")),
        SamplingParams(),
    ],
    ids=["greedy", "sampled", "alternatives", "stop strings", "end of sequence"],
)
@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"max_num_seqs": 5}, TIGHT),
        *(pytest.param(own, marks=pytest.mark.slow) for own in ({"max_num_seqs": 1}, {"enable_prefix_caching": False})),
    ],
    ids=str,
)
def test_native_bytes_are_the_eager_steps(params: SamplingParams, settings: dict[str, Any]) -> None:
    with LLM("asset:tinymath", speculation="off", enforce_eager=True, **settings) as eager:
        expected = outputs(eager, params)
        assert eager.stats.num_graph_steps == 0
    with LLM("asset:tinymath", speculation="off", **settings) as llm:
        for _ in range(3):  # The later rounds find every graph captured.
            check_equal(outputs(llm, params), expected)
            assert llm.block_manager.num_free_blocks == llm.num_kv_blocks
        assert llm.stats.num_graph_steps > 50
        if settings is TIGHT and params.ignore_eos:  # All requests' tokens do not fit together.
            assert llm.stats.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"max_num_seqs": 5}, {"max_model_len": 300}, {"max_num_seqs": 1}], ids=str)
def test_an_engine_captures_its_graphs_at_once_where_asked(settings: dict[str, Any]) -> None:
    """`capture_graphs` captures the graphs of every batch size, which have the eager steps' bytes."""
    params = SamplingParams(ignore_eos=True, max_tokens=9)
    with LLM("asset:tinymath", speculation="off", enforce_eager=True, **settings) as eager:
        expected = eager.generate(PROMPTS, params)
    with LLM("asset:tinymath", speculation="off", **settings) as llm:
        assert llm.runner is not None and llm.runner.graphs is not None
        llm.capture_graphs()
        lengths = [n for n in kv_lengths(llm.settings.max_model_len) if n <= LENGTH_AT_ONCE]
        sizes = batch_sizes(llm.config.max_num_seqs)
        assert set(llm.runner.graphs._captured) == {(size, length, False) for size in sizes for length in lengths}
        steps_at_start = llm.stats.num_graph_steps
        outs = llm.generate(PROMPTS, params)
        assert llm.stats.num_graph_steps - steps_at_start > llm.stats.num_steps // 2
    for output, eager_output in zip(outs, expected, strict=True):
        assert output.token_ids == eager_output.token_ids
        assert_bitwise_equal(output.logprobs, eager_output.logprobs)


@pytest.mark.gpu
def test_an_engine_captures_only_what_it_meets() -> None:
    """Scores are read without a decode step, and a batch of four meets one size; the largest serves it with memory."""
    with LLM("asset:tinymath", speculation="off", max_num_seqs=32) as llm:
        assert llm.runner is not None and llm.runner.graphs is not None
        llm.score([(PROMPTS[3], PROMPTS[4])] * 8)
        assert not llm.runner.graphs._captured
        llm.generate(PROMPTS[:4], SamplingParams(max_tokens=9, ignore_eos=True))
        shortest = kv_lengths(llm.settings.max_model_len)[0]
        assert set(llm.runner.graphs._captured) == {(size, shortest, False) for size in (4, 32)}
        assert llm.stats.num_graph_steps > 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa"])
def test_the_fast_mode_computes_the_same_thing(backend: str) -> None:
    """In fast, graphs and eager steps give first logprobs that differ by rounding only."""
    params = SamplingParams(ignore_eos=True)
    by_eager = {}
    for eager in (True, False):
        with LLM("asset:tinymath", batch_invariant=False, attention_backend=backend, enforce_eager=eager) as llm:
            by_eager[eager] = outputs(llm, params)
            assert (llm.stats.num_graph_steps > 0) == (not eager and llm.settings.attention_backend != "sdpa")
    differences = [abs(by_eager[True][i].logprobs[0] - by_eager[False][i].logprobs[0]) for i in range(len(PROMPTS))]
    assert max(differences) < 0.1


@pytest.mark.gpu
def test_on_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs CUDA devices, two of them")
    params = SamplingParams(ignore_eos=True)
    with LLM("asset:tinymath", speculation="off", enforce_eager=True, device="cuda:1") as eager:
        expected = outputs(eager, params)
    with LLM("asset:tinymath", speculation="off", device="cuda:1") as llm:
        for _ in range(3):
            check_equal(outputs(llm, params), expected)
        assert llm.stats.num_steps_ahead > 0


@pytest.mark.gpu
def test_steps_on_different_streams_follow_each_other() -> None:
    params = SamplingParams(ignore_eos=True)
    with LLM("asset:tinymath", speculation="off") as llm:
        expected = [outputs(llm, params) for _ in range(3)][-1]
        streams = [torch.cuda.Stream() for _ in range(3)]
        actual: dict[int, RequestOutput] = {}
        iterator = llm.run(requests(params))
        for i in range(len(expected)):
            with torch.cuda.stream(streams[i % 3]):
                output = next(iterator)
            actual[output.request_id] = output
        check_equal(actual, expected)


@pytest.mark.gpu
def test_a_batch_beyond_the_largest_graph_is_launched_eagerly() -> None:
    prompts = [[3 + i % 300, 5 + i // 300] for i in range(LARGEST_BATCH + 1)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM("asset:tinymath", speculation="off", max_num_seqs=1024, max_model_len=64) as llm:
        together = llm.generate(prompts, params)
        assert llm.stats.num_graph_steps == 0
        alone = llm.generate(prompts[:9], params)
        for output, batched in zip(alone, together, strict=False):
            assert_bitwise_equal(output.logprobs, batched.logprobs)


@pytest.mark.gpu
def test_without_memory_for_graphs_steps_are_launched_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(ignore_eos=True)
    with LLM("asset:tinymath", speculation="off", enforce_eager=True) as eager:
        expected = outputs(eager, params)

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(DecodeGraphs, "_step", refuse)
    with LLM("asset:tinymath", speculation="off") as llm:
        check_equal(outputs(llm, params), expected)
        assert llm.stats.num_graph_steps == 0
    assert caplog.text.count("no memory for a CUDA graph") == 1


@pytest.mark.gpu
def test_a_row_that_is_not_finite_fails_alone() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM("asset:tinymath", speculation="off") as llm:
        assert llm.runner is not None
        embedding = llm.runner.model.model.embed_tokens
        table = embedding.weight.detach().clone()  # The head stays tied to the old table.
        table[7] = float("nan")
        embedding.weight = torch.nn.Parameter(table, requires_grad=False)
        good = llm.generate([[5, 8, 11]], params)[0]
        for _ in range(3):
            batch = [GenerateRequest(0, [5, 8, 11], params), GenerateRequest(1, [5, 7, 11], params)]
            outputs = {output.request_id: output for output in llm.run(batch)}
            assert "not a finite number" in (outputs[1].error or "")
            assert outputs[0].error is None
            assert_bitwise_equal(outputs[0].logprobs, good.logprobs)
        assert llm.stats.num_graph_steps > 0
