"""The recorder on a real engine: it changes nothing, sees each token in whichever step, and finds one planted bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.explain import rerun
from evalengine.explain.rerun import ComputationRecorder, in_order
from evalengine.explain.trace import LOGITS, LOGPROB, Trace, explain
from evalengine.kernels.attention_batch import KVCache
from evalengine.records.schema import ids_sha256
from tests.bitwise import assert_bitwise_equal

MakeLLM = Callable[..., LLM]
SHARED = [(7 * i) % 300 + 3 for i in range(40)]
ITEM = 3  # The recorder listens to this request.
REQUESTS: list[Request] = [
    GenerateRequest(
        i, [*SHARED, *(5 + i + j for j in range(3 + 5 * i))], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    for i in range(6)
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "alone in each step": {"max_num_seqs": 1},
    "all at once": {"max_num_seqs": 8},
    "chunks of 17": {"max_num_seqs": 4, "max_num_batched_tokens": 17},
    "no prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": False},
    "preempted": {"max_num_seqs": 8, "num_kv_blocks": 8},
    "preempted, no prefix cache": {"max_num_seqs": 8, "num_kv_blocks": 14, "enable_prefix_caching": False},
}


def heard(
    llm: LLM, requests: Sequence[Request] = REQUESTS, item: int = ITEM, keep: Sequence[int] = ()
) -> tuple[Trace, dict[int, RequestOutput]]:
    """Runs the requests with a recorder on the item: the item's trace, and all outputs by id."""
    request = next(candidate for candidate in requests if candidate.request_id == item)
    recorder = ComputationRecorder(request, keep)
    with recorder.listening(llm):
        outputs = {output.request_id: output for output in llm.run(requests)}
    output = outputs[item]
    for computation in recorder.computations:
        number = computation.position - (len(output.prompt_ids) - 1)
        if LOGITS in computation.digests:
            computation.take(LOGPROB, output.logprobs[number : number + 1], keep=True)
    trace = Trace(
        label="",
        key=("task", item, 0, 0),
        prompt_sha256=ids_sha256(output.prompt_ids),
        prompt_tokens=len(output.prompt_ids),
        token_ids=[*output.prompt_ids, *output.token_ids],
        ops={**in_order(recorder.ops), LOGPROB: "float32"},
        computations=sorted(recorder.computations, key=lambda computation: computation.position),
        settings={},
        machine={},
        extent="",
        reproduced=None,
    )
    return trace, outputs


@pytest.fixture
def make_llm(make_llm: MakeLLM) -> MakeLLM:
    return partial(make_llm, device="cpu")


@pytest.fixture(scope="module")
def reference() -> dict[str, Trace]:
    """Numerics -> the trace of the item by itself, made once for the file."""
    return {}


@pytest.fixture
def alone(make_llm: MakeLLM, reference: dict[str, Trace]) -> Trace:
    """The trace of the item run by itself, in one chunk."""
    if "exact" not in reference:
        item = [request for request in REQUESTS if request.request_id == ITEM]
        reference["exact"] = heard(make_llm(), item)[0]
    return reference["exact"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_exact_has_no_difference_on_any_schedule(make_llm: MakeLLM, alone: Trace, name: str) -> None:
    llm = make_llm(**SCHEDULES[name])
    trace, _ = heard(llm)
    assert {computation.position for computation in trace.computations} == {*range(len(trace.fed_ids))}
    explanation = explain(alone, trace)
    assert explanation.first is None and explanation.common == len(alone.fed_ids)
    logits = next(row for row in explanation.ops if row.op == LOGITS)
    assert logits.compared == 12
    if name == "alone in each step":
        assert any(computation.reused for computation in trace.computations), "nothing came from the prefix cache"
    if "preempted" in name:
        assert llm.stats.num_preemptions and len(trace.computations) > len(trace.fed_ids), "nothing was computed again"


def test_the_recorder_changes_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=4, max_num_batched_tokens=50)
    assert llm.runner is not None
    _, listened = heard(llm)
    plain = {output.request_id: output for output in make_llm(max_num_seqs=4, max_num_batched_tokens=50).run(REQUESTS)}
    for number, output in plain.items():
        assert output.token_ids == listened[number].token_ids
        assert_bitwise_equal(output.logprobs, listened[number].logprobs)
    assert llm.runner.on_batch is None
    assert not any(module._forward_hooks for module in llm.runner.model.modules()), "a hook was left"


def plant(llm: LLM, op: str, position: int) -> None:
    """Adds one ulp to the first number of the op's output at the position, for whichever request has it."""
    assert llm.runner is not None
    model, step_inputs = llm.runner.model, {}

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        step_inputs["positions"] = inputs[1]

    def after(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        rows = (step_inputs["positions"] == position).nonzero().flatten()
        output = output.clone()
        flat = output.view(len(output), -1)
        flat[rows, 0] = torch.nextafter(flat[rows, 0], torch.full_like(flat[rows, 0], torch.inf))
        return output

    model.register_forward_pre_hook(before)
    model.get_submodule(op).register_forward_hook(after)


@pytest.mark.parametrize(
    "op",
    [
        "self_attn.qkv_proj",
        "self_attn.k_norm",
        "self_attn.q_rope",
        "self_attn.attention",
        "mlp.activation",
        "mlp.down_proj",
    ],
)
@pytest.mark.parametrize("position", [5, 46, 62])  # They lie in the shared prefix, the rest of the prompt, the answer.
def test_one_planted_ulp_is_named(make_llm: MakeLLM, alone: Trace, op: str, position: int) -> None:
    name = f"model.layers.1.{op}"
    llm = make_llm(max_num_seqs=4)
    plant(llm, name, position)
    explanation = explain(alone, heard(llm)[0])
    assert explanation.first is not None
    assert (explanation.first.op, explanation.first.position) == (name, position)
    size = explanation.first.size
    assert size is not None and (size.differing, size.max_ulps) == (1, 1)
    assert not any(row.differing for row in explanation.ops if ".layers.0." in row.op)


def test_fast_is_told_apart_where_exact_is_not() -> None:
    """The bundled model in fast float32 has other bits in another batch, and the op where they part is named."""
    traces = []
    for seqs in (1, 6):
        settings = {"batch_invariant": False, "dtype": "float32", "device": "cpu"}
        with LLM("asset:tinymath", max_num_seqs=seqs, **settings) as llm:  # type: ignore[arg-type]
            traces.append(heard(llm)[0])
    explanation = explain(*traces)
    assert explanation.first is not None, "fast agrees here: this test shows nothing"
    assert explanation.first.a.step_tokens != explanation.first.b.step_tokens
    rows_before = [
        row
        for row in explanation.ops
        if list(traces[0].ops).index(row.op) < list(traces[0].ops).index(explanation.first.op)
    ]
    assert not any(row.differing for row in rows_before)


@pytest.mark.gpu
def test_on_cuda_the_fused_kernels_parts_give_the_runs_bytes_and_no_schedule_differs() -> None:
    """Speculation is off, as in `explain.rerun`: the recorder hears rejected guesses, too, which are other inputs."""
    engine = partial(LLM, "asset:tinymath", device="cuda", speculation="off")
    traces = []
    for settings in ({"max_num_seqs": 1}, {"max_num_seqs": 6}, {"max_num_seqs": 4, "max_num_batched_tokens": 17}):
        with engine(**settings) as llm:
            trace, outputs = heard(llm)
        with engine(**settings) as llm:
            plain = list(llm.run(REQUESTS))
        for output in plain:
            assert_bitwise_equal(output.logprobs, outputs[output.request_id].logprobs)
        traces.append(trace)
    for other in traces[1:]:
        found = explain(traces[0], other).first
        assert found is None, (found.op, found.position, found.size, found.a.step_tokens, found.b.step_tokens)
    name, position = "model.layers.1.mlp.down_proj", 46
    with engine(max_num_seqs=6) as llm:
        plant(llm, name, position)
        first = explain(traces[0], heard(llm)[0]).first
    assert first is not None and (first.op, first.position) == (name, position)
    with engine(batch_invariant=False) as llm:
        fast = heard(llm)[0]
    assert list(fast.ops) == list(traces[0].ops) and fast.computations


def test_choices_of_one_context_are_followed_through_the_sequence_that_they_share(make_llm: MakeLLM) -> None:
    requests = [ScoreRequest(i, SHARED, [9 + i, 4, 5, 6 + i]) for i in range(4)]
    together = heard(make_llm(max_num_seqs=4), requests)[0]
    by_itself = heard(make_llm(), requests[ITEM : ITEM + 1])[0]
    explanation = explain(by_itself, together)
    assert explanation.first is None and explanation.common == len(SHARED) + 3
    assert next(row for row in explanation.ops if row.op == LOGITS).compared == 4
    llm = make_llm(max_num_seqs=4)
    plant(llm, "model.layers.0.mlp.down_proj", len(SHARED) - 1)
    planted = explain(by_itself, heard(llm, requests)[0])
    assert planted.first is not None and planted.first.position == len(SHARED) - 1


def test_unlike_dtypes_are_compared_by_value(make_llm: MakeLLM) -> None:
    """A bfloat16 table in float32 holds the same numbers, so the embedding does not differ, and a later op does."""
    wide, narrow = (make_llm(batch_invariant=False, dtype=name) for name in ("float32", "bfloat16"))
    for llm in (wide, narrow):  # Both get weights that bfloat16 holds.
        assert llm.runner is not None
    assert wide.runner is not None and narrow.runner is not None
    table = wide.runner.model.model.embed_tokens.weight
    table.data.copy_(narrow.runner.model.model.embed_tokens.weight.data)
    explanation = explain(heard(wide)[0], heard(narrow)[0])
    assert explanation.first is not None and explanation.first.op != "model.embed_tokens"
    assert (
        explanation.ops[0].op == "model.embed_tokens"
        and explanation.ops[0].compared > 0
        and explanation.ops[0].differing == 0
    )


def test_what_lies_in_the_pool_is_heard_not_what_was_meant_to(make_llm: MakeLLM, alone: Trace) -> None:
    """The trace holds what store_kv wrote to the pool, so a write that goes wrong is store_kv's difference."""
    llm = make_llm(max_num_seqs=4)
    assert llm.runner is not None
    real = llm.runner.ops.store_kv

    def wrong(k: Tensor, v: Tensor, kv: KVCache, slots: Tensor) -> None:
        real(k, torch.zeros_like(v), kv, slots)

    llm.runner.ops.store_kv = wrong  # type: ignore[method-assign]
    explanation = explain(alone, heard(llm)[0])
    assert explanation.first is not None and explanation.first.op == "model.layers.0.self_attn.store_kv.v"


def test_values_are_kept_while_there_is_room_and_where_they_are_asked_for(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "VALUES_BYTES", 20_000)
    trace, _ = heard(make_llm(), keep=[50])
    kept_bytes = sum(
        values.nbytes
        for computation in trace.computations
        for op, values in computation.values.items()
        if op != LOGPROB
    )
    kept_positions = [
        computation.position for computation in trace.computations if {*computation.values} == {*computation.digests}
    ]
    assert 50 in kept_positions and kept_bytes < 100_000 and len(kept_positions) < len(trace.fed_ids)
    monkeypatch.setattr(rerun, "VALUES_BYTES", 1 << 30)
    trace, _ = heard(make_llm())
    assert all({*computation.values} == {*computation.digests} for computation in trace.computations)
    assert all(
        values.dtype == np.float32 for computation in trace.computations for values in computation.values.values()
    )
