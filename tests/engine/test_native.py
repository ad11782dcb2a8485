"""`native` on a GPU: no schedule changes a byte, and the same comparisons see the ordinary mode's differences.

Known traps of other engines, and where each is tested:

* a query tile chosen by the batch's longest query: test_attention (neighbours, pieces)
* a norm whose block changes with the number of rows: test_rms_norm (any number of rows)
* logprobs that change with how many are asked for: axis `asked` below
* a stale logprob after a prefix hit; a hit that ends inside a page: axis `prefix` below
* a sampler that changes algorithm at 44 sequences: `test_sampling_any_number_of_sequences`
* TF32 by default: test_matmul and test_attention in float32; `test_tf32_settings_change_nothing`
* tiles picked under torch.compile and frozen, aten ops that dodge the overrides: tests/invariant
* an all-reduce that changes with the message's size: axis `tensor_parallel`, test_tensor_parallel_cuda
* element-wise ops whose vector body and tail round differently: test_exact_math, tests/invariant
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from evalengine.certify.model import open_checkpoint
from evalengine.certify.proof import Prover
from evalengine.certify.subject import Subject
from evalengine.cli.commands import AXES
from evalengine.engine.llm import LLM
from evalengine.engine.request import SamplingParams
from evalengine.verification.exact_kernels import exact_kernels_verdict
from tests.bitwise import assert_bitwise_equal

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * i + j * j) % 300 + 3 for j in range(1 + i % 37)] for i in range(64)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The bundled model in its default numerics, with room for 64 sequences."""
    with LLM("asset:tinymath", max_num_seqs=64) as engine:
        yield engine


def test_native_is_what_batch_invariant_means_on_cuda(llm: LLM) -> None:
    assert llm.settings.numerics == "native"
    assert llm.kernels_verdict and not llm.kernels_verdict["dropped"] and not llm.kernels_verdict["failed"]


def test_no_axis_changes_a_byte_and_the_ordinary_mode_differs() -> None:
    subject = Subject(("model.path=shape:qwen3-0.6b", "engine.device=cuda", "numerics=native"), "quick", layers=2)
    proof = Prover(subject, open_checkpoint(subject.config.model, 2), []).prove(
        [axis for axis in AXES if axis != "restart"]
    )
    assert proof.verdict == "IDENTICAL", proof.total
    assert proof.control.tally.differing_logprobs, "fast agrees here: this test shows nothing"
    assert proof.control.attention_backend in ("flash_attn", "triton")


def test_exact_kernels_have_their_bits_on_this_gpu() -> None:
    assert exact_kernels_verdict(torch.device("cuda"))["failed"] == []


def test_sampling_any_number_of_sequences(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.95, top_k=50, seed=3)
    together = llm.generate(PROMPTS, params)
    for count in (1, 43, 44, 45):
        for output, expected in zip(llm.generate(PROMPTS[:count], params), together, strict=False):
            assert output.token_ids == expected.token_ids
            assert_bitwise_equal(output.logprobs, expected.logprobs)
    greedy = llm.generate(PROMPTS, SamplingParams(max_tokens=5))
    assert any(a.token_ids != b.token_ids for a, b in zip(greedy, together, strict=True)), "nothing was sampled"


def test_tf32_settings_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(level: bool) -> torch.Tensor:
        with LLM("asset:tinymath", batch_invariant=level, dtype="float32") as engine:
            return torch.tensor([p for out in engine.score([(p, [5, 6]) for p in PROMPTS[1:9]]) for p in out.logprobs])

    native, fast = logprobs(True), logprobs(False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert_bitwise_equal(logprobs(True), native)
    assert not torch.equal(logprobs(False), fast), "TF32 changes nothing here: this test shows nothing"
