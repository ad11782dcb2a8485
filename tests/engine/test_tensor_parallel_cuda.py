"""Models on two GPUs: `native` gives one GPU's bytes, eagerly and by CUDA graphs, and a lost rank ends the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.arguments import OWN
from benchmarks.push_gather import TOKENS
from evalengine.certify.model import open_checkpoint
from evalengine.config.schema import ModelConfig
from evalengine.engine.llm import LLM
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams
from evalengine.errors import EvalEngineError
from evalengine.layers.peer_memory import PeerMemory
from tests.engine.test_tensor_parallel import children, differing, every_kind, is_alive, until

pytestmark = pytest.mark.gpu
SECONDS_TO_NOTICE = 20


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    """Skips every test here on a machine with fewer than two CUDA devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs CUDA, on two devices")


def wide() -> list[Request]:
    """Requests for batches of many sizes, so that graphs of several are replayed, over prompts of up to a few hundred
    tokens."""
    requests: list[Request] = list(every_kind())
    for i in range(48):
        prompt = [3 + (11 * i + j * j) % 300 for j in range(1 + 37 * i % 211)]
        params = SamplingParams(max_tokens=3 + i % 29, ignore_eos=True, temperature=float(i % 5 == 0), seed=i)
        requests.append(GenerateRequest(1000 + i, prompt, params))
    return requests


def answers(llm: LLM) -> dict[int, RequestOutput]:
    """The outputs of all requests by id."""
    return {output.request_id: output for output in llm.run(wide())}


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[int, RequestOutput]]:
    """The outputs of one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs CUDA, on two devices")
    with LLM("asset:tinymath", speculation="off") as llm:
        yield answers(llm)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 64}], ids=str)
def test_two_gpus_give_one_ones_bytes(settings: dict[str, Any], expected: dict[int, RequestOutput]) -> None:
    with LLM("asset:tinymath", speculation="off", tensor_parallel_size=2, **settings) as llm:
        for _ in range(2):
            assert not differing(answers(llm), expected)
            llm.reset_prefix_cache()
        assert (llm.stats.num_graph_steps > 0) != settings.get("enforce_eager", False)


@pytest.mark.parametrize("eager", [False, True])
def test_few_tokens_gather_in_one_with_the_ops(
    eager: bool, expected: dict[int, RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few tokens take the fused kernels and those of many the gathers and ops, with one GPU's bytes."""
    fused: set[tuple[str, bool]] = set()

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            result = method(*operands)
            fused.add((name, result is not None))
            return result

        return call

    names = "add_rms_norm", "silu_and_mul"
    for name in names:
        monkeypatch.setattr(PeerMemory, name, watched(name, getattr(PeerMemory, name)))
    with LLM("asset:tinymath", speculation="off", tensor_parallel_size=2, enforce_eager=eager) as llm:
        assert not differing(answers(llm), expected)
    assert fused == {(name, few) for name in names for few in (False, True)}


def test_fast_gives_other_bytes(expected: dict[int, RequestOutput]) -> None:
    """The comparison can fail: in fast, two GPUs give other bytes than one."""
    with LLM("asset:tinymath", speculation="off", batch_invariant=False) as one_gpu:
        alone = answers(one_gpu)
    with LLM("asset:tinymath", speculation="off", batch_invariant=False, tensor_parallel_size=2) as two_gpus:
        assert differing(answers(two_gpus), alone)


def test_a_large_models_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of Qwen3-8B's shape have the same bytes on two GPUs as on one."""
    checkpoint = open_checkpoint(ModelConfig(name="qwen3-8b", path="shape:qwen3-8b"), num_layers=2)
    requests = [r for r in wide() if not isinstance(r, GenerateRequest) or not r.params.stop]  # It has no tokenizer.
    with LLM(checkpoint, max_model_len=2048) as one_gpu:
        alone = {output.request_id: output for output in one_gpu.run(requests)}
    with LLM(checkpoint, max_model_len=2048, tensor_parallel_size=2) as two_gpus:
        assert not differing({output.request_id: output for output in two_gpus.run(requests)}, alone)


def test_the_bench_of_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bench of exchanges between two GPUs writes a time for every number of tokens."""
    assert OWN["push_gather"](["--model", "Qwen3-0.6B", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("push-gather-2-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(TOKENS) and all(0 < row[name] < 0.1 for row in rows for name in ("push_s", "fused_s"))
    assert capsys.readouterr().out.count("\n") == len(TOKENS) + 2


def test_a_killed_rank_ends_the_run(expected: dict[int, RequestOutput]) -> None:
    llm = LLM("asset:tinymath", speculation="off", tensor_parallel_size=2)
    (pid,) = children(llm)
    requests: list[Request] = [
        GenerateRequest(i, [5, i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(3)
    ]
    started = time.monotonic()
    with pytest.raises(EvalEngineError, match="rank 1 of this LLM was killed by signal 9"):
        list(llm.run(requests, lambda *_: os.kill(pid, signal.SIGKILL)))
    llm.close()
    assert time.monotonic() - started < SECONDS_TO_NOTICE
    until(lambda: not is_alive(pid), "the rank's end")
    with LLM("asset:tinymath", speculation="off") as llm_after:  # The device is usable afterwards.
        assert not differing(answers(llm_after), expected)
