"""A model that several processes share: in batch-invariant mode no degree changes a bit, and a rank that dies ends all.

Everything here runs on the CPU, in `exact`, with gloo; test_tensor_parallel_cuda.py has what needs two GPUs.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evalengine.config.schema import ModelConfig
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint
from evalengine.engine.load.weights import dummy_tensors
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.base import checkpoint_tensors
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.processors import LogitsProcessors
from tests.bitwise import assert_bitwise_equal

CPU = torch.device("cpu")
POOL = {"num_kv_blocks": 64, "block_size": 16}
SECONDS_TO_NOTICE = 20  # Generous, because other tests may take all cores.


def every_kind() -> list[Request]:
    """Generations: greedy, sampled, with alternatives, stopped by text. Scores: of several tokens, of one token each
    behind a shared context, with alternatives."""
    prompts = [[3 + (7 * i + j * j) % 300 for j in range(1 + 9 * i % 41)] for i in range(8)]
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, top_k=50, top_p=0.9, seed=3),
        SamplingParams(max_tokens=5, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=12, stop=("e", "1")),
    ]
    requests: list[Request] = [GenerateRequest(i, prompt, params[i % 4]) for i, prompt in enumerate(prompts)]
    requests += [ScoreRequest(100 + i, prompts[i], [9, 8, 7][: 1 + i % 3], 2 * (i % 2)) for i in range(8)]
    requests += [ScoreRequest(200 + i, prompts[3], [5 + i]) for i in range(4)]
    return requests


def answers(llm: LLM, requests: list[Request] | None = None) -> dict[int, RequestOutput]:
    """The outputs of the requests by id; without requests, those of every kind."""
    return {output.request_id: output for output in llm.run(every_kind() if requests is None else requests)}


def differing(outputs: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> list[int]:
    """The ids of requests whose outputs differ in any field, by bytes."""
    assert outputs.keys() == expected.keys()

    def contents(output: RequestOutput) -> tuple:
        return output.token_ids, output.logprobs.tobytes(), output.top_logprobs, output.text, output.error

    return [key for key in outputs if contents(outputs[key]) != contents(expected[key])]


def children(llm: LLM) -> list[int]:
    """The process ids of the LLM's ranks but rank 0."""
    return [process.pid for process in llm._ranks._children.processes]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return False


def until(happened: Callable[[], bool], event: str) -> None:
    """Waits until `happened()`, and fails with the event's name after SECONDS_TO_NOTICE."""
    end = time.monotonic() + SECONDS_TO_NOTICE
    while not happened():
        assert time.monotonic() < end, f"not within {SECONDS_TO_NOTICE} s: {event}"
        time.sleep(0.05)


def odd_model(source: Path, folder: Path, kv_heads: int) -> Checkpoint:
    """The small model with biases, a head of its own, a vocabulary that no degree divides, and weights in a file."""
    config = json.loads((source / "config.json").read_text())
    config.update(vocab_size=1031, tie_word_embeddings=False, attention_bias=True, num_key_value_heads=kv_heads)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text())
    plain = resolve_checkpoint(ModelConfig(name="odd", path=str(folder), load_format="dummy"))
    model = DecoderForCausalLM(plain.spec, create_ops("exact", torch.float32, CPU))
    shapes = {tensor.name: tensor.shape for tensor in checkpoint_tensors(model)}
    save_file({name: tensor.contiguous() for name, tensor in dummy_tensors(shapes, CPU)}, folder / "model.safetensors")
    return resolve_checkpoint(ModelConfig(name="odd", path=str(folder)))


@pytest.fixture(scope="module")
def odd(small_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The odd model with as many KV heads as two ranks can share."""
    return odd_model(small_checkpoint.path, tmp_path_factory.mktemp("odd"), 2)


TWO, ONE_KV_HEAD = (2, 2), (2, 1)  # The number of ranks, and the model's KV heads.
# Slow: two ranks of one KV head are quick, which are more than there are heads, too.
FOUR = pytest.param((4, 2), marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[TWO, ONE_KV_HEAD, FOUR], ids=str)
def asked(
    request: pytest.FixtureRequest, odd: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Checkpoint]:
    """A number of ranks, and the odd model with a number of KV heads."""
    ranks, kv_heads = request.param
    return ranks, odd if kv_heads == 2 else odd_model(odd.path, tmp_path_factory.mktemp("one_head"), kv_heads)


@pytest.fixture(scope="module")
def shared(asked: tuple[int, Checkpoint]) -> Iterator[LLM]:
    """The model on several ranks."""
    ranks, checkpoint = asked
    with LLM(checkpoint, tensor_parallel_size=ranks, **POOL) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(asked: tuple[int, Checkpoint]) -> dict[int, RequestOutput]:
    """The outputs of one rank."""
    with LLM(asked[1], **POOL) as llm:
        return answers(llm)


def test_every_kind_of_request_has_one_ranks_bytes(shared: LLM, expected: dict[int, RequestOutput]) -> None:
    assert not any(output.error for output in expected.values())
    assert not differing(answers(shared), expected)
    shared.runner.fill_pool(float("nan"))  # type: ignore[union-attr]
    shared.reset_prefix_cache()
    assert not differing(answers(shared), expected)


# Ranks of one KV head stay quick under one schedule, above.
@pytest.mark.parametrize("asked", [TWO, FOUR], indirect=True, ids=str)
def test_under_other_schedules_too(shared: LLM, expected: dict[int, RequestOutput]) -> None:
    """Other schedules on several ranks give one rank's bytes, too; a refused change leaves all ranks as they were."""
    for settings in (
        {"max_num_seqs": 3, "max_num_batched_tokens": 11, "block_size": 4, "num_kv_blocks": 40},
        {"num_kv_blocks": 5, "block_size": 16, "max_num_seqs": 8},
        {**POOL, "enable_prefix_caching": False},
    ):
        shared.reconfigure(**settings)
        assert not differing(answers(shared), expected), settings
    with pytest.raises(ConfigError, match="num_kv_blocks=1000000000"):
        shared.reconfigure(num_kv_blocks=10**9)
    assert not differing(answers(shared), expected), "a refused pool leaves all ranks as they were"
    with pytest.raises(ConfigError, match="tensor_parallel_size is fixed"):
        shared.reconfigure(tensor_parallel_size=1)
    shared.reconfigure(**POOL)


@pytest.mark.usefixtures("forked_ranks")
def test_fast_gives_other_bytes_for_another_degree(odd: Checkpoint) -> None:
    """The comparison can fail: in fast, sums over ranks have other bits, though their values are close."""
    with LLM(odd, batch_invariant=False, dtype="float32", **POOL) as one_rank:
        alone = answers(one_rank)
    with LLM(odd, batch_invariant=False, dtype="float32", tensor_parallel_size=2, **POOL) as two_ranks:
        together = answers(two_ranks)
    assert differing(together, alone)
    for key in range(100, 108):
        assert abs(together[key].logprobs - alone[key].logprobs).max() < 1e-3


@pytest.mark.usefixtures("forked_ranks")
def test_processors_choose_on_rank_0_alone(small_checkpoint: Checkpoint) -> None:
    """Two ranks give one rank's bytes; and end with rank 0 that is interrupted."""
    processors = LogitsProcessors(repetition_penalty=1.7, no_repeat_ngram_size=2)
    checkpoint = replace(small_checkpoint, spec=replace(small_checkpoint.spec, processors=processors))
    requests: list[Request] = [
        GenerateRequest(i, [5, 6, 7 + i], SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.5 * (i % 2)))
        for i in range(4)
    ]
    with LLM(checkpoint, **POOL) as one_rank, LLM(checkpoint, tensor_parallel_size=2, **POOL) as two_ranks:
        assert not differing(answers(two_ranks, requests), answers(one_rank, requests))
        check_interrupted(two_ranks, requests)


def check_interrupted(llm: LLM, requests: list[Request]) -> None:
    """Ctrl-C goes to all processes of a terminal's session: asserts that rank 0 alone is one, and that what it raises
    there amid a run leaves nothing once the LLM is closed."""
    pids, folder = children(llm), llm._ranks._children.folder
    assert all(os.getsid(pid) != os.getsid(0) for pid in pids), "they would be interrupted, too"
    run = iter(llm.run(requests, lambda *_: signal.raise_signal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without one
    try:
        with pytest.raises(KeyboardInterrupt):
            list(run)
    finally:
        signal.signal(signal.SIGINT, before)
    llm.close()
    until(lambda: not any(map(is_alive, pids)) and not folder.exists(), "the rank's end")


@pytest.mark.slow
def test_eight_ranks(odd: Checkpoint, tmp_path: Path) -> None:
    """Eight ranks, more than there are KV heads, give one rank's bytes."""
    config = json.loads((odd.path / "config.json").read_text())
    config.update(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = resolve_checkpoint(ModelConfig(name="eight", path=str(tmp_path), load_format="dummy"))
    requests = [r for r in every_kind() if isinstance(r, ScoreRequest) or not r.params.stop]  # There is no tokenizer.
    with LLM(checkpoint, **POOL) as one_rank:
        alone = answers(one_rank, requests)
    with LLM(checkpoint, tensor_parallel_size=8, **POOL) as eight_ranks:
        assert not differing(answers(eight_ranks, requests), alone)


def test_a_weight_that_is_not_finite_is_named_whichever_rank_has_it(odd: Checkpoint, tmp_path: Path) -> None:
    """The last rank's weight is named; and ranks of an engine that nobody closes end with it, as this one's do."""
    tensors = load_file(odd.path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][-1, 0] = float("nan")  # The last KV head is rank 1's.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((odd.path / name).read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), tensor_parallel_size=2, **POOL)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.error == "not a finite number at token 2: first in the output of model.layers.1.self_attn.qkv_proj"
    pids, folder = children(llm), llm._ranks._children.folder
    assert all(map(is_alive, pids)) and folder.is_dir()
    del llm
    until(lambda: not any(map(is_alive, pids)) and not folder.exists(), "the rank's end")


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_start_says_why(small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(Path(tempfile.gettempdir()).glob("evalengine-ranks-*"))
    monkeypatch.setattr("evalengine.engine.execute.parallel.ranks.START", "raise SystemExit('no torch here')")
    with pytest.raises(EvalEngineError, match=r"(?s)rank 1 of this LLM ended; its last words:\nno torch here"):
        LLM(small_checkpoint, tensor_parallel_size=2, **POOL)
    assert set(Path(tempfile.gettempdir()).glob("evalengine-ranks-*")) == before


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job would ignore
from evalengine import LLM
from evalengine.engine.request import GenerateRequest, SamplingParams
llm = LLM("asset:tinymath", tensor_parallel_size=2, device="cpu")
print(*(p.pid for p in llm._ranks._children.processes), llm._ranks._children.folder, flush=True)
params = SamplingParams(max_tokens=100, ignore_eos=True)
end = time.monotonic() + 120  # whatever becomes of the test
try:
    while time.monotonic() < end:
        llm.generate([[1, 2, 3 + i] for i in range(8)], params)
except KeyboardInterrupt:
    llm.close()
    print("interrupted", flush=True)
    sys.exit(130)
"""


@pytest.mark.slow  # two processes each; the ranks that processors leave above end at an interrupt, too
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_ranks_end_with_rank_0(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        pid, folder = process.stdout.readline().split()
        time.sleep(0.5)  # By then the run goes on.
        assert is_alive(int(pid))
        os.killpg(process.pid, number)  # A terminal's Ctrl-C, too, goes to the whole group.
        process.wait(SECONDS_TO_NOTICE)
    finally:
        process.kill()
    until(lambda: not is_alive(int(pid)) and not Path(folder).exists(), "the rank's end")
    if number == signal.SIGINT:
        assert process.returncode == 130 and process.stdout.read() == "interrupted\n"


# -- settings --------------------------------------------------------------------------------------------------------


def test_a_degree_that_does_not_divide_the_model_is_refused_with_those_that_do(odd: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"3 ranks cannot share this model's 4 attention heads.*it takes 1, 2, 4"):
        LLM(odd, tensor_parallel_size=3)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match=re.escape("engine.tensor_parallel_size=")):
            LLM(odd, tensor_parallel_size=wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_missing_gpus_are_named(odd: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="no usable CUDA device"):
        LLM(odd, tensor_parallel_size=2, device="cuda")


def test_a_checkpoint_travels_without_its_tokenizer(odd: Checkpoint) -> None:
    """A checkpoint without its tokenizer is equal after pickling, by which ranks get it."""
    unpickled = pickle.loads(pickle.dumps(replace(odd, tokenizer=None)))
    assert unpickled == replace(odd, tokenizer=None)


def test_logprobs_of_scores_are_those_of_generation(shared: LLM, expected: dict[int, RequestOutput]) -> None:
    generated = [output for key, output in expected.items() if key in (0, 4)]
    scored = shared.score([(output.prompt_ids, output.token_ids) for output in generated])
    for score, output in zip(scored, generated, strict=True):
        assert_bitwise_equal(score.logprobs, output.logprobs)


# The last tests of this file, because they end the ranks that the tests above share.
@pytest.mark.parametrize("asked", [TWO], indirect=True, ids=str)
def test_a_rank_that_fails_says_why(shared: LLM) -> None:
    shared._ranks.broadcast("compute", "nonsense")
    with pytest.raises(EvalEngineError, match=r"rank 1 of this LLM failed: TypeError: .*argument"):
        shared.generate([[1, 2]], SamplingParams(max_tokens=50, ignore_eos=True))


@pytest.mark.parametrize("asked", [ONE_KV_HEAD, FOUR], indirect=True, ids=str)
def test_a_rank_that_is_killed_takes_the_run_down_with_its_reason(shared: LLM) -> None:
    llm, pids, folder = shared, children(shared), shared._ranks._children.folder
    assert len(pids) in (1, 3) and all(map(is_alive, pids)) and folder.is_dir()
    victim = min(2, len(pids))
    requests: list[Request] = [
        GenerateRequest(i, [5, i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(3)
    ]
    run, started = iter(llm.run(requests, lambda *_: os.kill(pids[victim - 1], signal.SIGKILL))), time.monotonic()
    with pytest.raises(EvalEngineError, match=f"rank {victim} of this LLM was killed by signal 9"):
        list(run)
    assert time.monotonic() - started < SECONDS_TO_NOTICE
    with pytest.raises(EvalEngineError, match=f"rank {victim} of this LLM was killed"):
        llm.generate([[1, 2]])
    llm.close()
    until(lambda: not any(map(is_alive, pids)), "the other ranks' end")
    assert not folder.exists()
