"""A step may execute any number of times before it is committed (`engine.execute.rank_runner`), for each kind of state.

Each test makes an execution that does not count and compares what later steps read, or every answer's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from evalengine import LLM, SamplingParams
from evalengine.engine.execute.batch import Batch
from evalengine.engine.execute.cuda_graphs import DecodeGraphs
from evalengine.engine.execute.decode_inputs import DecodeInputs, KnownPages
from evalengine.engine.execute.model_runner import ModelRunner
from evalengine.engine.execute.rank_runner import RankRunner
from evalengine.engine.execute.read_out import LastTokens
from evalengine.engine.load.loader import Checkpoint, load_model
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.engine.schedule.scheduler import Chunk
from evalengine.engine.schedule.sequence import Generating
from evalengine.layers.cuda import NativeOps
from evalengine.layers.recurrent import HybridCache, States
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.engine.test_schedule_invariance import differing, one_by_one
from tests.parity.families import VOCAB
from tests.parity.paged import PagedRunner
from tests.parity.random_models import ModelFolders, without_tokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {
    "dense": "mistral",
    "windows": "gemma3",
    "sinks": "gpt-oss",
    "mixture": "qwen3-moe",
    "latent": "deepseek-v3",
    "gated delta": "qwen3.5",
    "Mamba-2": "granite-hybrid",
    "short convolution": "lfm2",
    "both branches": "falcon-h1",
}
RECURRENT = ["gated delta", "Mamba-2", "short convolution", "both branches"]
# Kinds whose states cannot drop a wrong guess: `exact` updates them token by token.
GUESSLESS = [kind for kind in RECURRENT if kind != "short convolution" and DEVICE.type == "cpu"]
MODE: dict[str, Any] = {"batch_invariant": True, "max_model_len": 96}


@pytest.fixture
def checkpoint(kind: str, folders: ModelFolders) -> Checkpoint:
    return without_tokenizer(folders(KINDS[kind]))


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (7 * number + 11 * j) % (VOCAB - 3) for j in range(tokens)]


def requests() -> list[Request]:
    """Generations of which two begin alike."""
    params = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=t) for t in (0.0, 0.9)]
    shared = [GenerateRequest(i, prompt(0, 20) + prompt(i, 1 + 4 * i), params[i % 2]) for i in range(3)]
    return [*shared, GenerateRequest(3, prompt(3, 30), params[0])]


@functools.cache
def alone(folder: Path) -> dict[int, RequestOutput]:
    return one_by_one(without_tokenizer(folder), requests(), **MODE, enforce_eager=True)


@pytest.fixture
def expected(kind: str, folders: ModelFolders) -> dict[int, RequestOutput]:
    """The outputs of a kind's requests, each run alone; computed once for a kind."""
    return alone(folders(KINDS[kind]))


def pools(caches: Any) -> Iterator[Tensor]:
    """Every pool of keys, values and states."""
    for cache in caches:
        if isinstance(cache, HybridCache):
            yield from pools(cache)
        else:
            yield from (cache.conv, *cache.recurrent) if isinstance(cache, States) else cache


# -- a graph's warm-up -------------------------------------------------------------------------------------------------


class Decoding:
    """Two sequences after their prompts, and the graphs whose inputs hold their next step."""

    def __init__(self, folder: Path) -> None:
        model = load_model(without_tokenizer(folder), NativeOps(torch.float32, DEVICE), 96)
        self.runner = PagedRunner(model, block_size=16)
        self.runner.step({"a": prompt(1, 2), "b": prompt(2, 5)})
        last = LastTokens(4, VOCAB, DEVICE)
        last.put(torch.tensor([5, 6], device=DEVICE))
        self.last, self.caches = last, self.runner.caches
        self.graphs = DecodeGraphs(
            model, model.ops, self.caches, last, block_size=16, max_num_seqs=4, max_model_len=96,
            states=bool(model.spec.recurrences),
        )  # fmt: skip
        chunks = []
        for row, (name, tokens) in enumerate((("a", 2), ("b", 5))):
            seq = Generating(
                prompt(1, tokens), request=GenerateRequest(0, [1]), max_output_tokens=9, stop_ids=frozenset()
            )
            seq.block_tables, seq.device_row, seq.state_slot = (
                [[*self.runner.pages[name], 60 + row]],
                row,
                self.runner.slot_of(name),
            )
            chunks.append(Chunk(seq, tokens, tokens + 1))
        known = KnownPages(4, states=bool(model.spec.recurrences))
        self.inputs = self.graphs._inputs
        self.inputs.fill(known.decodes(chunks))

    def everything(self) -> list[Tensor]:
        inputs = self.inputs
        return [x.clone() for x in (*pools(self.caches), inputs._scalars, inputs.state_slots, self.last.tokens)]

    @torch.inference_mode()
    def warm(self) -> None:
        self.graphs._warm(4, self.graphs._metadata((4, 96, False)))


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("gated delta", "short convolution") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_warm_up_changes_nothing(kind: str, folders: ModelFolders) -> None:
    """Not a byte of any pool, of the step's inputs or of the last tokens, however often it runs."""
    decoding = Decoding(folders(KINDS[kind]))
    before = decoding.everything()
    decoding.warm()
    decoding.warm()
    for found, expected in zip(decoding.everything(), before, strict=True):
        assert_bitwise_equal(found, expected)


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "short convolution" else pytest.param(kind, marks=pytest.mark.slow) for kind in RECURRENT],
)
def test_a_warm_up_over_the_steps_inputs_is_found(
    kind: str, folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse, which is how hybrids were wrong on a GPU: a state advances."""
    monkeypatch.setattr(DecodeInputs, "padding", lambda _: nullcontext())
    decoding = Decoding(folders(KINDS[kind]))
    before = decoding.everything()
    decoding.graphs._model.__dict__["layers_alike"] = False
    decoding.warm()
    assert any(count_differing(found, old) for found, old in zip(decoding.everything(), before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_captured_between_steps_change_nothing(
    checkpoint: Checkpoint, expected: dict[int, RequestOutput]
) -> None:
    """All graphs anew, in the middle of generations, between any two steps."""
    with LLM(checkpoint, **MODE, block_size=16, max_num_seqs=4) as llm:
        assert llm.runner is not None and llm.runner.graphs is not None
        graphs = llm.runner.graphs

        def capture_anew(_: object) -> None:
            graphs._captured.clear()
            graphs.__dict__.pop("_pool", None)  # torch frees a pool with its last graph
            llm.capture_graphs()

        for _ in range(2):
            outputs = {output.request_id: output for output in llm.run(requests(), capture_anew)}
            assert not differing(outputs, expected)
        assert llm.stats.num_graph_steps


# -- a step that fails after it has executed ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [1, 3])
def test_a_step_that_fails_after_it_has_executed(
    failing: int, checkpoint: Checkpoint, expected: dict[int, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages and states are written; it is scheduled anew, in smaller steps."""
    compute, steps = ModelRunner.compute, []

    def fails_once(self: ModelRunner, *arguments: Any) -> Any:
        results = compute(self, *arguments)
        steps.append(len(steps))
        if len(steps) == failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return results

    monkeypatch.setattr(ModelRunner, "compute", fails_once)
    with LLM(checkpoint, **MODE, block_size=16, max_num_seqs=4, max_num_batched_tokens=40, enforce_eager=True) as llm:
        outputs = {output.request_id: output for output in llm.run(requests())}
        assert llm.stats.num_shrunk_steps == 1
    assert not differing(outputs, expected)


# -- a step that is executed again to find a non-finite op -------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in RECURRENT])
def test_a_step_executed_again_changes_nothing(
    checkpoint: Checkpoint, expected: dict[int, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is, as if a number in it were not finite."""
    forward = RankRunner.forward

    def twice(self: RankRunner, batch: Batch) -> Tensor:
        monkeypatch.setattr(RankRunner, "forward", forward)
        culprits, first = self.culprits(batch)
        assert not culprits
        second = self.culprits(batch)[1]
        monkeypatch.setattr(RankRunner, "forward", twice)
        assert_bitwise_equal(first, second)
        return second

    monkeypatch.setattr(RankRunner, "forward", twice)
    with LLM(checkpoint, **MODE, block_size=16, max_num_batched_tokens=11, enforce_eager=True) as llm:
        assert not differing({output.request_id: output for output in llm.run(requests())}, expected)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_step_with_states_is_not_executed_again(kind: str, checkpoint: Checkpoint) -> None:
    """It is rejected where it would be; a row that is not finite fails by itself, without the name of an op."""
    with LLM(checkpoint, **MODE) as llm:
        assert llm.runner is not None
        with pytest.raises(AssertionError, match="recurrent states"):
            llm.runner.culprits(Batch.of([]))
        expected = {output.request_id: output for output in llm.run(requests()[:1])}
        embedding = llm.runner.model.model.embed_tokens
        table = embedding.weight.detach().clone()
        table[7] = float("nan")
        embedding.weight = torch.nn.Parameter(table, requires_grad=False)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        asked = [*requests()[:1], GenerateRequest(9, [5, 7, 11], params)]
        outputs = {output.request_id: output for output in llm.run(asked)}
    assert "not a finite number" in (outputs.pop(9).error or "")
    assert not differing(outputs, expected)


# -- guesses -----------------------------------------------------------------------------------------------------------


def guesses_of(outputs: dict[int, RequestOutput], how: str) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) pairs to learn: right, wrong from the second token on, or another request's."""
    for number, request in enumerate(requests()):
        assert isinstance(request, GenerateRequest)
        answer = [*outputs[(number + (how == "shuffled")) % len(outputs)].token_ids]
        yield request.prompt_ids, [token + 1 if how == "wrong" and i else token for i, token in enumerate(answer)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["right", "wrong", "shuffled"])
@pytest.mark.parametrize("speculation", ["auto", "always"])
def test_guesses_change_nothing(
    kind: str, how: str, speculation: str, checkpoint: Checkpoint, expected: dict[int, RequestOutput]
) -> None:
    """An earlier run's answers; where a state cannot drop a wrong guess, none is made, and the settings say so."""
    with LLM(checkpoint, **MODE, block_size=8, max_num_seqs=3, speculation=speculation) as llm:
        assert llm.runner is not None
        llm.runner.fill_pool(float("nan"))
        llm.learn_answers(guesses_of(expected, how))
        outputs = {output.request_id: output for output in llm.run(requests())}
        if kind in GUESSLESS:
            assert llm.settings.speculation == "off (recurrent state)" and not llm.stats.num_guesses
        else:
            right, made = llm.stats.num_right_guesses, llm.stats.num_guesses
            assert right if how == "right" else right < made if how == "wrong" else made or speculation == "auto"
    assert not differing(outputs, expected)
