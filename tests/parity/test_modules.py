"""Models that transformers' own module computes: logits as near to float64 as transformers' own, and its generations.

The pool of keys and values starts as NaN.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from evalengine import LLM, ConfigError, SamplingParams
from evalengine.engine.load.loader import load_model
from evalengine.engine.request import GenerateRequest
from evalengine.layers import create_ops
from evalengine.models.hf_module.model import TransformersForCausalLM
from tests.parity.families import make as make_family
from tests.parity.modules import CASES, make
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import check_as_near, models_of, rms, tokens

# Level, device, and how many times transformers' error ours may be: both are sums of many roundings.
LEVELS = [
    ("fast", "cpu", 1.5),
    ("exact", "cpu", 1.5),
    *(pytest.param(level, "cuda", 3, marks=[pytest.mark.gpu]) for level in ("fast", "native")),
]


reference = models_of(make, CASES)


@pytest.mark.parametrize(("level", "device", "most"), LEVELS)
def test_logits_are_as_near_to_float64_as_transformers_are(
    reference: tuple[PreTrainedModel, Path], level: str, device: str, most: float
) -> None:
    """Of a whole prompt, and of one in chunks whose borders lie within pages."""
    hf, folder = reference
    ids = tokens(41)
    checkpoint, ops = without_tokenizer(folder, "transformers"), create_ops(level, torch.float32, torch.device(device))
    if problems := [problem for variant in checkpoint.spec.variants for problem in ops.problems(variant)]:
        with pytest.raises(ConfigError, match=problems[0]):
            load_model(checkpoint, ops, 128)
        return
    model = load_model(checkpoint, ops, 128)
    check_as_near(hf, model, ids, most)


def test_greedy_generation_equals_generate(reference: tuple[PreTrainedModel, Path]) -> None:
    hf, folder = reference
    prompts = [tokens(count, count) for count in (1, 31)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    checkpoint = without_tokenizer(folder, "transformers")
    exact = create_ops("exact", torch.float32, torch.device("cpu"))
    level = "fast" if any(exact.problems(variant) for variant in checkpoint.spec.variants) else "exact"
    with LLM(checkpoint, batch_invariant=level != "fast", numerics=level, max_model_len=64, dtype="float32") as llm:
        outputs = {o.request_id: o for o in llm.run([GenerateRequest(i, p, params) for i, p in enumerate(prompts)])}
    hf.generation_config.eos_token_id = None
    for number, prompt in enumerate(prompts):
        with torch.inference_mode():
            whole = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
        assert list(outputs[number].token_ids) == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("level", ["fast", "exact"])
@pytest.mark.parametrize("name", ["mistral", "olmo2", "pythia"])
def test_a_native_family_and_transformers_module_agree_to_rounding(name: str, level: str, tmp_path: Path) -> None:
    make_family(name, tmp_path)
    ids, results = tokens(41), []
    for implementation in ("native", "transformers"):
        checkpoint = without_tokenizer(tmp_path, implementation=implementation)
        assert checkpoint.spec.implementation == implementation
        model = load_model(checkpoint, create_ops(level, torch.float32, torch.device("cpu")), 128)
        results.append(PagedRunner(model, block_size=7).step({"s": ids})["s"])
        assert isinstance(model, TransformersForCausalLM) is (implementation == "transformers")
    native, theirs = results
    assert rms(native - theirs) <= 2e-5 * rms(theirs)
