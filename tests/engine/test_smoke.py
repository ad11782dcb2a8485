"""Every family, at every level and in every dtype of a CPU, loads and answers a short request without a traceback."""

from __future__ import annotations

import math
from itertools import product

import pytest

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.errors import ConfigError
from tests.parity.families import CASES, VOCAB
from tests.parity.random_models import ModelFolders, without_tokenizer

QUICK = {
    model_type: name for name, (model_type, _) in reversed(CASES.items())
}.values()  # the first case of each family
LEVELS = {"exact": True, "fast": False}  # level -> batch_invariant
DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_family_loads_and_answers(name: str, folders: ModelFolders) -> None:
    checkpoint, prompt = without_tokenizer(folders(name)), list(range(3, 17))
    requests = [
        GenerateRequest(0, prompt, SamplingParams(max_tokens=3, ignore_eos=True)),
        ScoreRequest(1, prompt, [5, 9]),
    ]
    for (level, invariant), dtype in product(LEVELS.items(), DTYPES):
        settings = {"numerics": level, "batch_invariant": invariant, "device": "cpu", "dtype": dtype}
        with LLM(checkpoint, max_model_len=64, **settings) as llm:
            outputs = list(llm.run(requests))
        for output, count in zip(sorted(outputs, key=lambda o: o.request_id), (3, 2), strict=True):
            assert len(output.token_ids) == len(output.logprobs) == count, (level, dtype)
            assert all(0 <= token < VOCAB for token in output.token_ids), (level, dtype)
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in output.logprobs), (level, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_is_refused_on_a_cpu(dtype: str, folders: ModelFolders) -> None:
    with pytest.raises(ConfigError, match=r"numerics=native runs on CUDA only, .*: use numerics=exact or auto"):
        LLM(without_tokenizer(folders("llama")), numerics="native", device="cpu", dtype=dtype, max_model_len=64)
