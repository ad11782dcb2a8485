"""One table: every family, at every level that promises it, gives the same bytes whatever a schedule varies.

`fast`, which promises none, shows for every family that a change is seen.

The prompts cross windows, pages and chunks; the pool starts as NaN, so that nothing is read before it was written.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine import LLM, SamplingParams
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, ScoreRequest
from evalengine.engine.settings import possible_ranks
from evalengine.explain.rerun import _named
from evalengine.layers.hooks import op_hook
from evalengine.layers.parallel import TensorParallel
from tests.engine.test_schedule_invariance import Schedule, differing, one_by_one, run
from tests.parity.families import CASES, VOCAB
from tests.parity.random_models import ModelFolders, without_tokenizer

# What is unlike the reference, in which each request is alone: one thing at a time, then all.
ALONE: dict[str, Any] = {"block_size": 64, "num_kv_blocks": 64, "max_num_seqs": 1, "enable_prefix_caching": False}
AXES: dict[str, dict[str, Any]] = {
    "batch": {**ALONE, "max_num_seqs": 64},
    "order": {**ALONE, "max_num_seqs": 3, "order": 5},
    "chunks": {**ALONE, "max_num_batched_tokens": 11},
    "pages": {**ALONE, "block_size": 7, "num_kv_blocks": 120},
    "prefix hits": {**ALONE, "block_size": 8, "num_kv_blocks": 120, "enable_prefix_caching": True},
    "threads": {**ALONE, "num_threads": 2},
    "preemption": {"block_size": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 23, "order": 5},
    "two ranks": {"block_size": 16, "num_kv_blocks": 64, "tensor_parallel_size": 2},
    # Preempts as well, unless windows give pages back in time.
    "all at once": {
        "block_size": 7, "num_kv_blocks": 15, "max_num_batched_tokens": 17, "num_threads": 2, "order": 5
    },
}  # fmt: skip
SCHEDULES = [Schedule(**AXES["all at once"]), Schedule(**AXES["preemption"])]
LEVELS: dict[str, dict[str, Any]] = {
    "of the device": {"batch_invariant": True},  # `exact` on a CPU, `native` on a GPU
    "exact": {"batch_invariant": True, "numerics": "exact"},
    "native": {"batch_invariant": True, "numerics": "native"},
}
# The families of which `make test` varies each thing by itself: a window, experts, norms over all heads, a recurrence.
EACH = ["gemma3", "qwen2-moe", "olmo3", "lfm2"]
PREEMPTED = ["gemma3", "qwen2-moe", "lfm2"]  # olmo3's windows give pages back in time
# A family for each thing that ranks could part: whole-vector norms, norms on outputs, parallel branches, scales, caps,
# experts with a shared one and its gate, biases and sinks, dense layers; latents.
OVER_RANKS = [
    *("olmo2", "gemma2", "cohere2", "granite", "pythia", "phi3-partial", "qwen2-moe", "gpt-oss", "glm4-moe"),
    "deepseek-v3",
    # Recurrences: heads of values and keys, groups of Mamba-2 that ranks share and that they have, branches beside each
    # other, layers of one branch, channels alone.
    *("qwen3.5", "granite-hybrid", "falcon-h1-normed", "falcon-h1-unscaled", "nemotron-h", "olmo-hybrid", "lfm2"),
]
# Ranks share the same code at every level: `exact` on GPUs runs each kind of gather once.
EXACT_OVER_RANKS = ["olmo2", "deepseek-v3", "qwen3.5"]


def table() -> list[Any]:
    """Family x level x axis; what is slow or for a GPU is marked."""
    rows = []
    for name, level, axis in product(CASES, LEVELS, AXES):
        quick = name in OVER_RANKS if axis == "two ranks" else name in EACH or axis == "all at once"
        if level == "exact":  # torch ops on a GPU as on a CPU: one schedule shows what GPUs do, of each kind of layer
            axes = ("all at once", "two ranks") if name in EXACT_OVER_RANKS else ("all at once",)
            quick = quick and axis in axes and (name in OVER_RANKS or name in EACH)
        marks = [] if quick else [pytest.mark.slow]
        if level != "of the device":  # by name where `-m gpu` selects them; a CPU has `exact` already
            marks.append(pytest.mark.gpu)
        rows.append(pytest.param(name, level, axis, marks=marks, id=f"{name}-{level}-{axis}"))
    return rows


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


@pytest.fixture
def checkpoint(name: str, folders: ModelFolders) -> Checkpoint:
    return without_tokenizer(folders(name))


@cache
def reference(name: str, level: str, folder: Path) -> dict[int, RequestOutput]:
    """Each request alone, in one chunk, without a prefix cache and without CUDA graphs."""
    return one_by_one(without_tokenizer(folder), requests(), **LEVELS[level], max_model_len=96, enforce_eager=True)


def differs_from_scores(checkpoint: Checkpoint, outputs: dict[int, RequestOutput], **mode: Any) -> list[int]:
    """The requests whose answer, scored alone in one chunk, has other logprobs or is not as greedy.

    That is one step per request where `reference` takes one per token. It does not show which token a sample draws.
    """
    scores = [
        ScoreRequest(r.request_id, r.prompt_ids, outputs[r.request_id].token_ids)
        if isinstance(r, GenerateRequest) else r
        for r in requests()
    ]  # fmt: skip
    scored = one_by_one(checkpoint, scores, **mode)
    assert all(outputs[r.request_id].is_greedy for r in requests()[:5:2]), "the greedy generations"
    return differing(outputs, scored) + [i for i in scored if scored[i].is_greedy != outputs[i].is_greedy]


def overwrite_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what rank 0 gathered with NaN when it gathers again: GPUs may overwrite it from then on
    (`kernels/push_gather.py`), the CPU's process group does not."""
    real, last = TensorParallel.gather_features, [torch.empty(0)]

    def gather_features(tp: TensorParallel, x: Tensor) -> Tensor:
        last[0].fill_(torch.nan)
        last[0] = real(tp, x)
        return last[0]

    monkeypatch.setattr(TensorParallel, "gather_features", gather_features)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("name", "level", "axis"), table())
def test_no_schedule_changes_a_bit(
    name: str, level: str, axis: str, folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = without_tokenizer(folders(name))
    settings = dict(AXES[axis])
    ranks = settings.pop("tensor_parallel_size", 1)
    if ranks not in possible_ranks(checkpoint.spec):
        pytest.skip("two ranks cannot share the tiny model")
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    mode = {**LEVELS[level], "max_model_len": 96, "tensor_parallel_size": ranks}
    schedule = Schedule(**settings, preempts=axis == "preemption" and name in PREEMPTED)
    with monkeypatch.context() as patch:  # what one rank "gathers" is its own tensor, which must stay
        if ranks > 1 and not torch.cuda.is_available():
            overwrite_gathered(patch)
        outputs = run(checkpoint, requests(), schedule, **mode)
    if name in EACH or axis not in ("all at once", "two ranks") or torch.cuda.is_available():
        assert not differing(outputs, reference(name, level, folders(name)))
    else:  # a family's only schedules in `make test`, in which `EACH` shows what is drawn
        assert not differs_from_scores(checkpoint, outputs, **LEVELS[level], max_model_len=96)


@pytest.mark.parametrize(
    "name", [name if name in EACH else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_ordinary_mode_is_seen_to_differ(checkpoint: Checkpoint) -> None:
    """The control of the table: the same comparisons find another byte where none is promised."""
    mode = {"batch_invariant": False, "max_model_len": 96}
    expected = one_by_one(checkpoint, requests(), **mode)
    outputs = run(checkpoint, requests(), Schedule(**AXES["all at once"]), **mode)
    assert differing(outputs, expected), "the comparison sees nothing"
    assert differs_from_scores(checkpoint, outputs, **mode), "the comparison with scores sees nothing"


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
