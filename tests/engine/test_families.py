"""Every family gives the same bytes under every schedule, and over ranks; `fast` shows that a change is seen.

The prompts cross windows, pages and chunks; the pool starts as NaN, so that nothing is read before it was written.
"""

from __future__ import annotations

import pytest

from evalengine import LLM, SamplingParams
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.explain.record import _named
from evalengine.layers.hooks import op_hook
from tests.engine.test_schedule_invariance import Schedule, differing, one_by_one, run
from tests.parity.families import CASES, VOCAB, make
from tests.parity.random_models import ModelFolders, without_tokenizer

# All axes at once: batch, order, chunks, pages, prefix cache, threads; then a pool so tight that some are preempted.
SCHEDULES = [
    Schedule(block_size=7, num_kv_blocks=120, max_num_batched_tokens=11, num_threads=2, order=5),
    Schedule(block_size=16, num_kv_blocks=6, max_num_seqs=5, order=2),
]
# A family for each thing that ranks could part: whole-vector norms, norms on outputs, parallel branches, scales, caps,
# experts with a shared one and its gate, biases and sinks, dense layers; latents.
OVER_RANKS = [
    *("olmo2", "gemma2", "cohere2", "granite", "pythia", "phi3-partial", "qwen2-moe", "gpt-oss", "glm4-moe"),
    "deepseek-v3",
    # Recurrences: heads of values and keys, groups of Mamba-2 that ranks share and that they have, branches beside each
    # other, layers of one branch, channels alone.
    *("qwen3.5", "granite-hybrid", "falcon-h1-normed", "nemotron-h", "olmo-hybrid", "lfm2"),
]


def requests() -> list[Request]:
    """Generations, greedy and sampled, with and without a common beginning; and scores behind it."""
    common = [3 + (5 * j + j * j) % (VOCAB - 3) for j in range(33)]
    own = [[3 + (7 * i + 11 * j) % (VOCAB - 3) for j in range(1 + 8 * i)] for i in range(5)]
    params = [
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=7, temperature=0.9, ignore_eos=True),
    ]
    made: list[Request] = [GenerateRequest(i, (common if i % 2 else []) + own[i], params[i % 2]) for i in range(5)]
    return [*made, *(ScoreRequest(10 + i, common, own[i][:9]) for i in range(3))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(make, tmp_path_factory)


@pytest.fixture
def checkpoint(name: str, folders: ModelFolders) -> Checkpoint:
    return without_tokenizer(folders(name))


@pytest.mark.parametrize("name", CASES)
def test_no_schedule_changes_a_bit(checkpoint: Checkpoint) -> None:
    expected = one_by_one(checkpoint, requests(), batch_invariant=True, max_model_len=96)
    for schedule in SCHEDULES:
        outputs = run(checkpoint, requests(), schedule, batch_invariant=True, max_model_len=96)
        assert not differing(outputs, expected), schedule


@pytest.mark.parametrize("name", ["gemma2"])
def test_the_ordinary_mode_is_seen_to_differ(checkpoint: Checkpoint) -> None:
    expected = one_by_one(checkpoint, requests(), batch_invariant=False, max_model_len=96)
    outputs = run(checkpoint, requests(), SCHEDULES[0], batch_invariant=False, max_model_len=96)
    assert differing(outputs, expected), "the comparison sees nothing"


@pytest.mark.parametrize("name", OVER_RANKS)
def test_two_ranks_give_the_bytes_of_one(checkpoint: Checkpoint) -> None:
    expected = one_by_one(checkpoint, requests(), batch_invariant=True, max_model_len=96)
    schedule = Schedule(block_size=16, num_kv_blocks=64)
    outputs = run(checkpoint, requests(), schedule, batch_invariant=True, max_model_len=96, tensor_parallel_size=2)
    assert not differing(outputs, expected)


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_an_explanation_names_each_table_of_angles(checkpoint: Checkpoint) -> None:
    """A model whose layers have RoPEs of their own has several; their outputs are told apart."""
    seen: set[str] = set()
    with (
        LLM(checkpoint, batch_invariant=True, max_model_len=96) as llm,
        op_hook(llm.runner.model, lambda op, _: seen.add(op)),
    ):
        list(llm.run(requests()[:1]))
    assert {"cos", "sin", "cos1", "sin1"} <= {_named(op).rpartition(".")[2] for op in seen if "rope_table" in op}
